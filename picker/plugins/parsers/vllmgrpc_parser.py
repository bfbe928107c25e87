"""vllmgrpc-parser: understands vLLM's gRPC service `vllm.grpc.engine.VllmEngine`.

    Generate: GenerateRequest{tokenized=2{input_ids=2} | text=3, sampling_params=4{max_tokens=8},
              stream=5, mm_inputs=7{mm_placeholders=5{offset=1, length=2}, mm_hashes=6}}
    Embed:    EmbedRequest{tokenized=2{input_ids=2}}
    other:    not read, and nor is the response

A body is one uncompressed gRPC frame. It goes on as it came; it names no model. `tokenized` or
`text` must be there; one that is empty tells nothing of the prompt. Every multi-modal item counts
as an image.

    GenerateResponse{chunk=1{prompt_tokens=2, completion_tokens=3, cached_tokens=4} |
                     complete=2{prompt_tokens=3, completion_tokens=4, cached_tokens=5}}
    EmbedResponse{prompt_tokens=2}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from picker.errors import bad_request
from picker.framework.grpc_frames import FrameSplitter, only_message
from picker.framework.interfaces import ResponseReader
from picker.framework.multimodal import check_items
from picker.framework.protobuf_wire import (
    MAX_FIELDS_OF_ITEM,
    Value,
    WireError,
    fields,
    last_bytes,
    last_number,
    repeated_uint32,
    text,
)
from picker.framework.registry import Parameters, PluginType
from picker.framework.services import Services
from picker.framework.token_ids import pack_token_ids
from picker.framework.usage import merge
from picker.types import Api, MultiModalFeature, ParsedBody, Usage

_GENERATE = "/Generate"
_EMBED = "/Embed"
_IMAGE = "image"


class VllmGrpcParser:
    """Takes the methods of the engine's service."""

    claims: tuple[str, ...] = (
        "vllm.grpc.engine.VllmEngine/Generate",
        "vllm.grpc.engine.VllmEngine/Embed",
    )

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Read the frame. Raises `RefusedError` (400) for what is none, or holds no prompt."""
        trimmed = path.rstrip("/")
        if not trimmed.endswith((_GENERATE, _EMBED)):
            return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
        try:
            message = only_message(body)
            return _generate(message) if trimmed.endswith(_GENERATE) else _embed(message)
        except ValueError as error:  # a broken frame or message, or items that cannot be
            raise bad_request(f"invalid gRPC request: {error}") from error

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        """A reader of frames."""
        return _FrameUsage()


@dataclass(slots=True)
class _Generate:
    """What has been found in a GenerateRequest; of `tokenized` and `text` the last counts.

    Of a field that comes several times the last counts, and only that one is read. One that is
    there may be empty.
    """

    tokenized: bytes | None = None
    text: bytes | None = None
    sampling_params: bytes = b""
    mm_inputs: bytes = b""
    stream: bool = False

    def take(self, number: int, value: Value) -> None:
        """Note one field."""
        if number == 5:
            self.stream = bool(value)
        elif not isinstance(value, bytes):
            return
        elif number == 2:
            self.text, self.tokenized = None, value
        elif number == 3:
            self.text, self.tokenized = value, None
        elif number == 4:
            self.sampling_params = value
        elif number == 7:
            self.mm_inputs = value


def _generate(message: bytes) -> ParsedBody:
    request = _Generate()
    for number, value in fields(message):
        request.take(number, value)
    if request.tokenized is None and request.text is None:
        raise WireError("a GenerateRequest must have tokenized or text")
    prompts = () if request.tokenized is None else _prompts(request.tokenized)
    features = _features(request.mm_inputs)
    for prompt in prompts:
        check_items(features, prompt)
    return ParsedBody(
        api=Api.VLLM_GRPC,
        stream=request.stream,
        payload={"prompt": text(request.text)} if request.text else None,
        max_output_tokens=last_number(request.sampling_params, 8),
        can_rewrite=False,
        prompts=prompts,
        features=(features,) * len(prompts),
    )


def _embed(message: bytes) -> ParsedBody:
    tokenized = last_bytes(message, 2)
    if tokenized is None:
        raise WireError("an EmbedRequest must have tokenized")
    prompts = _prompts(tokenized)
    return ParsedBody(
        api=Api.VLLM_GRPC, can_rewrite=False, prompts=prompts, features=((),) * len(prompts)
    )


def _prompts(tokenized: bytes) -> tuple[bytes, ...]:
    """The one prompt in `tokenized`; none where that has no token ids."""
    ids: list[int] = []
    for number, value in fields(tokenized):
        if number == 2:
            ids += repeated_uint32(value)
    packed = pack_token_ids(ids)
    return () if packed is None else (packed,)


def _features(mm_inputs: bytes) -> tuple[MultiModalFeature, ...]:
    places: list[tuple[int, int]] = []
    hashes: list[str] = []
    for number, value in fields(mm_inputs):
        if number == 5 and isinstance(value, bytes):
            offset, length = (last_number(value, one, MAX_FIELDS_OF_ITEM) or 0 for one in (1, 2))
            places.append((offset, length))
        elif number == 6:
            hashes.append(text(value))
    return tuple(
        MultiModalFeature(_IMAGE, content_hash, offset, length)
        for content_hash, (offset, length) in zip(hashes, places, strict=False)
    )


@dataclass(slots=True)
class _FrameUsage:
    """Reads a stream of response frames; what cannot be read tells nothing."""

    usage: Usage | None = None
    _frames: FrameSplitter = field(default_factory=FrameSplitter)

    def feed(self, data: bytes, is_last: bool) -> None:
        """Take a piece."""
        for message in self._frames.feed(data):
            try:
                said = _usage_of(message)
            except WireError:
                continue
            if said is not None:
                self.usage = merge(self.usage, said)


def _usage_of(message: bytes) -> Usage | None:
    # The second field tells the messages apart: one in a GenerateResponse, a number in the other.
    first: Value | None = None
    second: Value | None = None
    for number, value in fields(message):
        if number == 1:
            first = value
        elif number == 2:
            second = value
    if isinstance(second, int):
        return Usage(prompt_tokens=second)
    if second is not None:
        return _counts(second, 3)
    return _counts(first, 2) if isinstance(first, bytes) else None


def _counts(message: bytes, first: int) -> Usage:
    prompt, completion, cached = (last_number(message, first + i) for i in range(3))
    return Usage(prompt or 0, completion or 0, cached_tokens=cached)


def _create(name: str, parameters: Parameters, _services: Services) -> VllmGrpcParser:
    return VllmGrpcParser()


PLUGIN = PluginType("vllmgrpc-parser", Parameters, _create)
