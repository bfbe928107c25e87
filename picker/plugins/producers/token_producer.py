"""token-producer: the tokens of each prompt of a request, estimated without a tokenizer.

Estimate mode takes the prompt's UTF-8 bytes as they are and calls each four of them one
pseudo-token (little endian, zero-padded tail). Two prompts with a common beginning have common
first tokens, which is all that a prefix cache needs.

What the byte stream of a prompt is:

- chat: the JSON of `tools` (keys sorted) if there are any, then for each message its role and its
  content, a string or blocks, without separators;
- completions: the prompt; one stream for each string of a list;
- embeddings: the input, likewise;
- responses: the JSON of instructions, tools and input; conversations: the JSON of the items;
- integer arrays: real token ids, passed through.

A media block contributes a number of copies of a token made from XXH64 of its content: an image
225 (640 × 360 pixels at 1024 a token), a video 4500 (10 s, 2 frames a second), audio a quarter of
its characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from struct import Struct, pack
from typing import Any

import msgspec
import xxhash

from picker.framework.attributes import Attributes, DataKey
from picker.framework.registry import Parameters, PluginType
from picker.types import Api, Candidate, InferenceRequest

TOKENIZED_PROMPT: DataKey[None] = DataKey("TokenizedPrompt", "token-producer")
BYTES_PER_TOKEN = 4
IMAGE_TOKENS = 225
VIDEO_TOKENS = 4500
_UINT32 = Struct("<I")
_MAX_TOKEN = 2**32 - 1
_RESPONSE_PARTS = ("instructions", "tools", "input")


class EstimateParameters(Parameters, frozen=True):
    """`estimate: {}`; its fine tuning is not supported yet."""


class TokenProducerParameters(Parameters, frozen=True):
    """`parameters` of a token-producer."""

    estimate: EstimateParameters | None = None


class TokenProducer:
    """Fills `InferenceRequest.prompts`. Stateless."""

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        """The tokenized prompt; it travels in the request, so the instance's name is no matter."""
        return (TOKENIZED_PROMPT,)

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """The request with its prompts; as it is when it has some already, or no readable body."""
        payload = request.body.payload
        if request.prompts or payload is None:
            return request
        prompts = tuple(prompt for prompt in _prompts(request.body.api, payload) if prompt)
        return replace(request, prompts=prompts) if prompts else request


def _prompts(api: Api, payload: Mapping[str, Any]) -> Iterator[bytes]:
    if api is Api.CHAT_COMPLETIONS:
        yield _padded(_chat(payload))
    elif api is Api.COMPLETIONS:
        yield from _texts(payload.get("prompt"))
    elif api is Api.EMBEDDINGS:
        yield from _texts(payload.get("input"))
    elif api is Api.RESPONSES:
        parts = [{key: payload[key]} for key in _RESPONSE_PARTS if payload.get(key)]
        yield _padded(_json(parts))
    elif api is Api.CONVERSATIONS:
        yield _padded(_json(payload.get("items")))


def _texts(value: object) -> Iterator[bytes]:
    """One prompt for a string or a list of token ids; one for each element of a list of those."""
    if isinstance(value, str):
        yield _padded(value.encode(errors="surrogatepass"))
    elif isinstance(value, list) and value:
        if _are_token_ids(value):
            yield pack(f"<{len(value)}I", *value)
        else:
            for element in value:
                if isinstance(element, str) or _are_token_ids(element):
                    yield from _texts(element)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token <= _MAX_TOKEN for token in value
    )


def _chat(payload: Mapping[str, Any]) -> bytes:
    stream = bytearray()
    if tools := payload.get("tools"):
        stream += _json(tools)
    messages = payload.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            stream += _utf8(message.get("role"))
            _add_content(stream, message.get("content"))
    return bytes(stream)


def _add_content(stream: bytearray, content: object) -> None:
    if isinstance(content, str):
        stream += _utf8(content)
        return
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, Mapping):
            continue
        if block.get("type") == "text":
            stream += _utf8(block.get("text"))
        else:
            _add_media(stream, block)


def _add_media(stream: bytearray, block: Mapping[str, Any]) -> None:
    kind = block.get("type")
    asset = block.get(kind) if isinstance(kind, str) else None
    if isinstance(asset, Mapping):
        content = _utf8(asset.get("url") or asset.get("data")) + _utf8(asset.get("format"))
    else:
        content = _utf8(asset)
    if kind == "image_url":
        count = IMAGE_TOKENS
    elif kind == "video_url":
        count = VIDEO_TOKENS
    elif kind in ("input_audio", "audio_url"):
        count = -(-len(content) // BYTES_PER_TOKEN)
    else:
        return
    stream += bytes(-len(stream) % BYTES_PER_TOKEN)
    stream += _UINT32.pack(xxhash.xxh64_intdigest(content) & _MAX_TOKEN) * count


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _utf8(value: object) -> bytes:
    return value.encode(errors="surrogatepass") if isinstance(value, str) else b""


def _padded(text: bytes) -> bytes:
    return text + bytes(-len(text) % BYTES_PER_TOKEN)


PLUGIN = PluginType(
    "token-producer",
    TokenProducerParameters,
    lambda _name, _parameters, _services: TokenProducer(),
    default_for=(TOKENIZED_PROMPT.data_type,),
    deprecated_aliases=("tokenizer",),
)
