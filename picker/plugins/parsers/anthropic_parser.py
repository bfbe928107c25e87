"""anthropic-parser: understands the request bodies of Anthropic's Messages API.

`messages`: must be there and not empty; a content is a text or a list of blocks, and so is
`system`. `messages/count_tokens`: the body goes on raw, and its response is nobody's business.

A response tells its usage in `usage`; a stream in its `message_start` and `message_delta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picker.errors import bad_request
from picker.framework.interfaces import ResponseReader
from picker.framework.registry import Parameters, PluginType
from picker.framework.request_bodies import json_object, model_of, text_member, whole_number
from picker.framework.services import Services
from picker.framework.usage import anthropic_usage, usage_reader
from picker.types import Api, ParsedBody

_NAME = "messages"
_MESSAGES = "/messages"
_COUNT_TOKENS = "/messages/count_tokens"


class AnthropicParser:
    """Takes the paths that end in `/messages` and `/messages/count_tokens`."""

    claims: tuple[str, ...] = ("messages", "messages/count_tokens")

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Decode and check `body`. Raises `RefusedError` (400) naming what is wrong."""
        trimmed = path.rstrip("/")
        if trimmed.endswith(_COUNT_TOKENS):
            return ParsedBody(Api.RAW, can_rewrite=False, skip_response=True)
        if not trimmed.endswith(_MESSAGES):
            raise bad_request(f"unsupported Anthropic API path '{path}'")
        payload = json_object(body)
        _check(payload)
        return ParsedBody(
            api=Api.MESSAGES,
            model=model_of(payload),
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=whole_number(payload, ("max_tokens",)),
            cache_salt=text_member(payload, "cache_salt", _NAME),
        )

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        """A reader of JSON, or of events where the response says that it is a stream of them."""
        return usage_reader(content_type, anthropic_usage)


def _check(payload: Mapping[str, Any]) -> None:
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"invalid {_NAME} request: must have messages field")
    for message in messages:
        if not isinstance(message, dict) or not _is_content(message.get("content")):
            raise bad_request(f"invalid {_NAME} request: must have valid messages field")
    if not _is_content(payload.get("system")):
        raise bad_request(f"invalid {_NAME} request: system must be a string or a list of blocks")
    tools = payload.get("tools")
    if tools is not None and not _are_objects(tools):
        raise bad_request(f"invalid {_NAME} request: tools must be a list of objects")


def _is_content(content: object) -> bool:
    return content is None or isinstance(content, str) or _are_objects(content)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)


def _create(name: str, parameters: Parameters, _services: Services) -> AnthropicParser:
    return AnthropicParser()


PLUGIN = PluginType("anthropic-parser", Parameters, _create)
