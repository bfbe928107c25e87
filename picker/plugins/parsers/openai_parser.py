# Apart: a plugin type, and every type is a file.
"""Understands the request bodies of the OpenAI APIs, as far as a routing decision needs them.

Unknown members are the endpoint's business and pass. What is checked is what producers read: the
prompt or its counterpart, the cache salt, the model, the output cap; and the types of what the
reference reads. Lists of token ids are prompts that need no tokenizer; a list of such lists is
taken too, as the engines take it, and so is the address of an image in place of an object with it.
vLLM's own `pooling` is as `embeddings`, and both take `messages` in place of `input`; its batch of
chats has a list of conversations for `messages`.

A response tells its usage in its `usage`, or in that of an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from picker.errors import RefusedError, bad_request
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins.parsers._json_bodies import (
    check_shape,
    json_object,
    model_of,
    text_member,
    whole_number,
)
from picker.plugins.parsers._usage import openai_usage, usage_reader
from picker.tokenization.token_ids import pack_token_ids
from picker.types import Api, ParsedBody

MAX_REMEMBERED = 64  # paths, which clients choose
# A check returns the prompts that are token ids already, None for what is not acceptable.
_Check = Callable[[object], "tuple[bytes, ...] | None"]


class _Asset(msgspec.Struct):
    url: str | None = None
    data: str | None = None
    format: str | None = None


class _Block(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    image_url: _Asset | str | None = None
    video_url: _Asset | str | None = None
    audio_url: _Asset | str | None = None
    input_audio: _Asset | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | list[_Block] | None = None
    tool_calls: list[Any] | None = None


class _Chat(msgspec.Struct):
    messages: list[_Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    chat_template: str | None = None
    return_assistant_tokens_mask: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _ChatBatch(msgspec.Struct):
    messages: list[list[_Message]]
    tools: list[Any] | None = None


class _Input(msgspec.Struct):
    messages: list[_Message] | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None


class _Conversation(msgspec.Struct):
    items: list[_Item]
    metadata: dict[str, Any] | None = None


class _Images(msgspec.Struct):
    n: int | None = None
    size: str | None = None
    num_inference_steps: int | None = None


class OpenAIParser:
    """One parser for every path of the OpenAI API that carries a model."""

    claims: tuple[str, ...] = (
        "chat/completions",
        "chat/completions/batch",
        "completions",
        "embeddings",
        "pooling",
        "responses",
        "conversations",
        "chat/completions/render",
        "completions/render",
        "images/generations",
    )

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        payload = json_object(body)
        api = api_of(path)
        required, check, caps = _RULES[api]
        prompts = check(payload.get(required))
        if prompts is None and api in _WITH_MESSAGES and "input" not in payload:
            prompts = _items(payload.get("messages"))
        if prompts is None:
            raise _missing(api, required)
        if api in _SHAPES:
            check_shape(payload, _SHAPES[api], _NAMES[api])
        return ParsedBody(
            api=api,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload, caps),
            cache_salt=text_member(payload, "cache_salt", _NAMES[api]),
            prompts=prompts,
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, openai_usage)


@lru_cache(MAX_REMEMBERED)
def api_of(path: str) -> Api:
    """The API that `path` belongs to; completions when none is recognised."""
    trimmed = path.rstrip("/").removesuffix("/render")
    for suffix, api in _API_BY_SUFFIX:
        if trimmed.endswith(suffix):
            return api
    return Api.COMPLETIONS


def _missing(api: Api, member: str) -> RefusedError:
    valid = "valid " if api is Api.CHAT_COMPLETIONS else ""
    return bad_request(f"invalid {_NAMES[api]} request: must have {valid}{member} field")


def _prompt(prompt: object) -> tuple[bytes, ...] | None:
    """Text, a list of texts, a list of token ids, or a list of such lists; not empty."""
    if isinstance(prompt, str):
        return () if prompt else None
    if not isinstance(prompt, list) or not prompt:
        return None
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return ()
    if kinds != {list}:
        packed = pack_token_ids(prompt)
        return None if packed is None else (packed,)
    batch = [packed for ids in prompt if (packed := pack_token_ids(ids)) is not None]
    return tuple(batch) if len(batch) == len(prompt) else None


def _text(value: object) -> tuple[bytes, ...] | None:
    return () if isinstance(value, str) and value else None


def _items(value: object) -> tuple[bytes, ...] | None:
    return () if isinstance(value, list) and value else None


def _anything(value: object) -> tuple[bytes, ...] | None:
    return None if value is None else ()


# Per API: the member it cannot do without, its check, and where the output cap may stand.
_RULES: Mapping[Api, tuple[str, _Check, tuple[str, ...]]] = {
    Api.CHAT_COMPLETIONS: (
        "messages",
        _items,
        ("max_completion_tokens", "max_tokens"),
    ),
    Api.CHAT_BATCH: ("messages", _items, ("max_completion_tokens", "max_tokens")),
    Api.COMPLETIONS: ("prompt", _prompt, ("max_tokens",)),
    Api.RESPONSES: ("input", _anything, ("max_output_tokens",)),
    Api.CONVERSATIONS: ("items", _items, ()),
    Api.EMBEDDINGS: ("input", _prompt, ()),
    Api.POOLING: ("input", _prompt, ()),
    Api.IMAGES: ("prompt", _text, ()),
}
_WITH_MESSAGES = (Api.EMBEDDINGS, Api.POOLING)
# Per API: the types of the members that the reference reads, any of which may be null.
_SHAPES: Mapping[Api, type[msgspec.Struct]] = {
    Api.CHAT_COMPLETIONS: _Chat,
    Api.CHAT_BATCH: _ChatBatch,
    Api.EMBEDDINGS: _Input,
    Api.POOLING: _Input,
    Api.CONVERSATIONS: _Conversation,
    Api.IMAGES: _Images,
}
_NAMES: Mapping[Api, str] = {
    Api.CHAT_COMPLETIONS: "chat completions",
    Api.CHAT_BATCH: "chat completions batch",
    Api.COMPLETIONS: "completions",
    Api.RESPONSES: "responses",
    Api.CONVERSATIONS: "conversations",
    Api.EMBEDDINGS: "embeddings",
    Api.POOLING: "pooling",
    Api.IMAGES: "images generations",
}
_API_BY_SUFFIX = (
    ("/conversations", Api.CONVERSATIONS),
    ("/responses", Api.RESPONSES),
    ("/chat/completions", Api.CHAT_COMPLETIONS),
    ("/chat/completions/batch", Api.CHAT_BATCH),
    ("/completions", Api.COMPLETIONS),
    ("/embeddings", Api.EMBEDDINGS),
    ("/pooling", Api.POOLING),
    ("/images/generations", Api.IMAGES),
)


PLUGIN = PluginType("openai-parser", Parameters, plain(OpenAIParser))
