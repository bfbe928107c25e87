"""vllmgrpc-parser: understands vLLM's gRPC service `vllm.grpc.engine.VllmEngine`.

    Generate: GenerateRequest{tokenized=2{input_ids=2} | text=3, sampling_params=4{max_tokens=8},
              stream=5, mm_inputs=7{mm_placeholders=5{offset=1, length=2}, mm_hashes=6}}
    Embed:    EmbedRequest{tokenized=2{input_ids=2}}
    other:    not read, nor is the response

A body is forwarded unchanged; it names no model. Only a body of one uncompressed gRPC frame is
read: any other, and one with neither `tokenized` nor `text`, is routed without a prompt. Every
multi-modal item counts as an image.

    GenerateResponse{chunk=1{prompt_tokens=2, completion_tokens=3, cached_tokens=4} |
                     complete=2{prompt_tokens=3, completion_tokens=4, cached_tokens=5}}
    EmbedResponse{prompt_tokens=2}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from picker.contrib.grpc_parsers._frames import FrameSplitter, only_message
from picker.contrib.grpc_parsers._generated import grpc_bodies_pb2 as pb
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import PluginType
from picker.plugins.parsers._usage import merge
from picker.tokenization.multimodal import check_items
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, MultiModalFeature, ParsedBody, Usage

_GENERATE = "/Generate"
_EMBED = "/Embed"
_IMAGE = "image"
MAX_ITEMS = 2**16  # an item may have two bytes, and takes a microsecond here


class VllmGrpcParser:
    claims: tuple[str, ...] = (
        "vllm.grpc.engine.VllmEngine/Generate",
        "vllm.grpc.engine.VllmEngine/Embed",
    )

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        trimmed = path.rstrip("/")
        if not trimmed.endswith((_GENERATE, _EMBED)):
            return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
        try:
            return _generate(body) if trimmed.endswith(_GENERATE) else _embed(body)
        except ValueError:  # compressed, several frames, a broken one, or impossible items
            return ParsedBody(Api.VLLM_GRPC, can_rewrite=False)

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return _FrameUsage()


def _generate(body: bytes) -> ParsedBody:
    request = only_message(pb.GenerateRequest, body)
    params = request.sampling_params
    prompts = _prompts(request.tokenized)
    features = _features(request.mm_inputs)
    for prompt in prompts:
        check_items(features, prompt)
    return ParsedBody(
        api=Api.VLLM_GRPC,
        stream=request.stream,
        payload={"prompt": request.text} if request.text else None,
        max_output_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        can_rewrite=False,
        prompts=prompts,
        features=(features,) * len(prompts),
    )


def _embed(body: bytes) -> ParsedBody:
    request = only_message(pb.EmbedRequest, body)
    prompts = _prompts(request.tokenized)
    return ParsedBody(
        api=Api.VLLM_GRPC, can_rewrite=False, prompts=prompts, features=((),) * len(prompts)
    )


def _prompts(tokenized: pb.TokenizedInput) -> tuple[bytes, ...]:
    packed = pack_token_ids(list(tokenized.input_ids))
    return () if packed is None else (packed,)


def _features(inputs: pb.MultimodalInputs) -> tuple[MultiModalFeature, ...]:
    if len(inputs.mm_hashes) > MAX_ITEMS:
        raise ValueError("there are too many multi-modal items")
    return tuple(
        MultiModalFeature(_IMAGE, content_hash, place.offset, place.length)
        for content_hash, place in zip(inputs.mm_hashes, inputs.mm_placeholders, strict=False)
    )


@dataclass(slots=True)
class _FrameUsage:
    """Reads a stream of response frames; skips unreadable ones."""

    usage: Usage | None = None
    _frames: FrameSplitter = field(default_factory=FrameSplitter)

    def feed(self, data: bytes, is_last: bool) -> None:
        for message in self._frames.feed(data):
            try:
                said = _usage_of(message)
            except DecodeError:
                continue
            if said is not None:
                self.usage = merge(self.usage, said)


def _usage_of(message: bytes) -> Usage | None:
    # The second field distinguishes the messages: a number in an EmbedResponse, a message in the
    # other. Protobuf skips a field of an unexpected type.
    embedded = pb.EmbedResponse.FromString(message)
    if embedded.HasField("prompt_tokens"):
        return Usage(prompt_tokens=embedded.prompt_tokens)
    response = pb.GenerateResponse.FromString(message)
    kind = response.WhichOneof("response")
    if kind is None:
        return None
    counts = response.chunk if kind == "chunk" else response.complete
    cached = counts.cached_tokens if counts.HasField("cached_tokens") else None
    return Usage(counts.prompt_tokens, counts.completion_tokens, cached_tokens=cached)


PLUGINS = (PluginType("vllmgrpc-parser", VllmGrpcParser),)
