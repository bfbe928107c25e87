"""Understands the request bodies of the OpenAI APIs, as far as a routing decision needs them.

Unknown members are the endpoint's business and pass. What is checked is what producers read: the
prompt or its counterpart, the cache salt, the model, the output cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from picker.errors import RefusedError, bad_request
from picker.framework.registry import Parameters, PluginType
from picker.framework.services import Services
from picker.types import Api, ParsedBody

_MAX_TOKEN_ID = 2**32 - 1
_decode = msgspec.json.Decoder().decode


class OpenAIParser:
    """One parser for every path of the OpenAI API that carries a model."""

    claims: tuple[str, ...] = (
        "chat/completions",
        "completions",
        "embeddings",
        "responses",
        "conversations",
        "chat/completions/render",
        "completions/render",
        "images/generations",
    )

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Decode and check `body`. Raises `RefusedError` (400) naming what is wrong."""
        payload = _json_object(body)
        api = api_of(path)
        required, is_valid, caps = _RULES[api]
        if not is_valid(payload.get(required)):
            raise _missing(api, required)
        model, salt = payload.get("model"), payload.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise bad_request(f"invalid {_NAMES[api]} request: cache_salt must be a string")
        return ParsedBody(
            api=api,
            model=model if isinstance(model, str) else "",
            stream=payload.get("stream") is True,
            payload=payload,
            max_output_tokens=_output_cap(payload, caps),
            cache_salt=salt or "",
        )


def api_of(path: str) -> Api:
    """The API that `path` belongs to; completions when none is recognised."""
    trimmed = path.rstrip("/").removesuffix("/render")
    for suffix, api in _API_BY_SUFFIX:
        if trimmed.endswith(suffix):
            return api
    return Api.COMPLETIONS


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        payload = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"error unmarshaling request bodyMap: {error}") from error
    if not isinstance(payload, dict):
        kind = type(payload).__name__
        raise bad_request(f"error unmarshaling request bodyMap: expected an object, got {kind}")
    return payload


def _missing(api: Api, member: str) -> RefusedError:
    valid = "valid " if api is Api.CHAT_COMPLETIONS else ""
    return bad_request(f"invalid {_NAMES[api]} request: must have {valid}{member} field")


def _output_cap(payload: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is a whole number of at least zero; 1e3 and 5.0 are whole."""
    for name in names:
        value = payload.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _is_conversation(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(isinstance(block, dict) for block in content)


def _is_prompt(prompt: object) -> bool:
    """Text, a list of texts, a list of token ids, or a list of such lists; not empty."""
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    kinds = set(map(type, prompt))
    if kinds == {list}:
        return all(map(_are_token_ids, prompt))
    return kinds == {str} or _are_token_ids(prompt)


def _are_token_ids(value: list[Any]) -> bool:
    # By type, as a bool is an int to isinstance; without a loop, as token lists are long.
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_TOKEN_ID


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_present(value: object) -> bool:
    return value is not None


# Per API: the member it cannot do without, its check, and where the output cap may stand.
_RULES: Mapping[Api, tuple[str, Callable[[object], bool], tuple[str, ...]]] = {
    Api.CHAT_COMPLETIONS: (
        "messages",
        _is_conversation,
        ("max_completion_tokens", "max_tokens"),
    ),
    Api.COMPLETIONS: ("prompt", _is_prompt, ("max_tokens",)),
    Api.RESPONSES: ("input", _is_present, ("max_output_tokens",)),
    Api.CONVERSATIONS: ("items", _is_list, ()),
    Api.EMBEDDINGS: ("input", _is_prompt, ()),
    Api.IMAGES: ("prompt", _is_text, ()),
}
_NAMES: Mapping[Api, str] = {
    Api.CHAT_COMPLETIONS: "chat completions",
    Api.COMPLETIONS: "completions",
    Api.RESPONSES: "responses",
    Api.CONVERSATIONS: "conversations",
    Api.EMBEDDINGS: "embeddings",
    Api.IMAGES: "images generations",
}
_API_BY_SUFFIX = (
    ("/conversations", Api.CONVERSATIONS),
    ("/responses", Api.RESPONSES),
    ("/chat/completions", Api.CHAT_COMPLETIONS),
    ("/completions", Api.COMPLETIONS),
    ("/embeddings", Api.EMBEDDINGS),
    ("/images/generations", Api.IMAGES),
)


def _create(name: str, parameters: Parameters, _services: Services) -> OpenAIParser:
    return OpenAIParser()


PLUGIN = PluginType("openai-parser", Parameters, _create)
