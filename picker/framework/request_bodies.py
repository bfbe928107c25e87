"""What the parsers of JSON request bodies share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from picker.errors import bad_request

# Everything that decoding bytes of unknown origin may raise.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder().decode


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; of a repeated member the last counts.

    Raises `RefusedError` (400) for anything else.
    """
    try:
        payload = _decode(body)
    except UNREADABLE as error:
        raise bad_request(f"error unmarshaling request bodyMap: {error}") from error
    if not isinstance(payload, dict):
        kind = type(payload).__name__
        raise bad_request(f"error unmarshaling request bodyMap: expected an object, got {kind}")
    return payload


def text_member(payload: Mapping[str, Any], name: str, request: str) -> str:
    """The text `payload[name]`, "" when it is absent or null.

    Raises `RefusedError` (400) when it is anything else; `request` names the kind of request.
    """
    value = payload.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad_request(f"invalid {request} request: {name} must be a string")
    return value


def model_of(payload: Mapping[str, Any]) -> str:
    """The model that `payload` names; "" when it names none in the right type."""
    model = payload.get("model")
    return model if isinstance(model, str) else ""


def whole_number(payload: object, names: tuple[str, ...]) -> int | None:
    """The first of the members `names` that is a whole number of at least zero.

    1e3 and 5.0 are whole; None when there is none, or `payload` is no object.
    """
    if not isinstance(payload, dict):
        return None
    for name in names:
        value = payload.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
