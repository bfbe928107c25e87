"""anthropic-parser: understands the request bodies of Anthropic's Messages API.

`messages`: must be there and not empty; a content is a text or a list of blocks, and so is
`system`. `messages/count_tokens`: only the model is read, as no cache holds what is only counted;
nor is its response.

A response tells its usage in `usage`; a stream in its `message_start` and `message_delta`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from picker.plugins.parsers._usage import anthropic_usage, usage_reader
from picker.types import Api, ParsedBody

_NAME = "messages"
_MESSAGES = "/messages"
_COUNT_TOKENS = "/messages/count_tokens"


class _Source(msgspec.Struct):
    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Block(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    source: _Source | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | list[_Block] | None = None


class _Request(msgspec.Struct):
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[dict[str, Any]] | None = None


class AnthropicParser:
    """Takes the paths that end in `/messages` and `/messages/count_tokens`."""

    claims: tuple[str, ...] = ("messages", "messages/count_tokens")

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        trimmed = path.rstrip("/")
        if trimmed.endswith(_COUNT_TOKENS):
            return _counted(body)
        if not trimmed.endswith(_MESSAGES):
            raise bad_request(f"unsupported Anthropic API path '{path}'")
        payload = json_object(body)
        messages = payload.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request(f"invalid {_NAME} request: must have messages field")
        check_shape(payload, _Request, _NAME)
        return ParsedBody(
            api=Api.MESSAGES,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload, ("max_tokens",)),
            cache_salt=text_member(payload, "cache_salt", _NAME),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        return usage_reader(content_type, anthropic_usage)


def _counted(body: bytes) -> ParsedBody:
    """What is no JSON object goes on as it came: it is the endpoint's to refuse."""
    try:
        payload = json_object(body)
    except RefusedError:
        return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
    return ParsedBody(Api.RAW, model=model_of(payload), payload=payload, skip_response=True)


PLUGIN = PluginType("anthropic-parser", Parameters, plain(AnthropicParser))
