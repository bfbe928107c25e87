"""JSON bodies → checked structs: strict, and every refusal names the field at fault. Pure."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from worker.api.http.limits import malformed, malformed_json
from worker.errors import RequestError

_INT64 = 1 << 63

Body = TypeVar("Body", bound=msgspec.Struct)


class Whole(int):
    """A whole number of a body, at most 64 bits wide. `3.0` is one too, as clients whose numbers
    are all floats (JavaScript, Lua) send them; `3.5`, `"3"` and `true` are not.
    """


# Messages may repeat what the client wrote, in the middle: the place stands at the end.
_AT = r" - at (?:`(?:key|value)` in )?`\$\.?([^`]*)`"
_LOCATION = re.compile(rf"{_AT}\Z")
_FIELD = re.compile(
    rf"Object (?:contains (unknown)|missing required) field `(.*?)`(?:{_AT})?\Z", re.S
)
# What vLLM checks apart from the shape of the body, and so reports as it does a value out of range:
# parts of a message without their place, and these by their name alone.
_PART = re.compile(r"messages\[\d+\]\.content\[")
_COUNTS = re.compile(r"(?:top_|prompt_)?logprobs|cache_salt")
_NO_PROMPT = ("Missing required field `prompt`", "prompt: Expected `str | array`, got `null`")
_SHOWN_CHARS = 80
_REASON_CHARS = 200


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body strictly. Raises `RequestError` naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind, dec_hook=_decode_whole)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(body, str(error)) from error
    except RecursionError as error:
        raise malformed("The body is nested too deeply") from error


def schema_hook(kind: type) -> dict[str, Any]:
    """JSON schema of the types that msgspec does not know; for `msgspec.json.schema`."""
    if kind is Whole:
        return {"type": "integer", "minimum": -_INT64, "maximum": _INT64 - 1}
    raise NotImplementedError(kind)


def plain(value: object) -> int:
    """A `Whole` as msgspec can write it: the `enc_hook` of whoever encodes a parsed body."""
    if isinstance(value, Whole):
        return int(value)
    raise NotImplementedError(type(value))


def shown(value: object) -> str:
    """A client's value as an error message repeats it: cut when it is long."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _decode_whole(kind: type, value: Any) -> Whole:
    if kind is not Whole:
        raise NotImplementedError(kind)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"Expected `int`, got `{_json_name(value)}`")
    if value != value // 1:
        raise ValueError(f"Expected `int`, got {shown(value)}")
    if not -_INT64 <= value < _INT64:
        raise ValueError("Integer value out of range: it must fit into 64 bits")
    return Whole(value)


def _json_name(value: object) -> str:
    name = type(value).__name__
    return {"list": "array", "dict": "object"}.get(name, name)


def _explained(message: str) -> RequestError:
    """msgspec's message, with the field it speaks of as `param`."""
    found = _FIELD.match(message)
    if found:
        unknown, name, path = found.groups()
        field = f"{path}.{shown(name)}" if path else shown(name)
        if unknown:
            reason = f"Unknown field `{field}`: it is not part of this API"
        else:
            reason = f"Missing required field `{field}`"
        return _misshapen(reason, field)
    location = _LOCATION.search(message)
    path = location.group(1).removesuffix("[...]") if location else ""
    reason = message if location is None else message[: location.start()]
    if len(reason) > _REASON_CHARS:
        reason = reason[:_REASON_CHARS] + "…"
    if _COUNTS.fullmatch(path) and not reason.startswith("Expected `bool"):  # chat's is a switch
        return RequestError(f"{path}: {reason}", param=path)
    return _misshapen(f"{path}: {reason}" if path else reason, path)


def _misshapen(message: str, path: str) -> RequestError:
    if message in _NO_PROMPT:
        return RequestError(message, param=path)
    return RequestError(message) if _PART.match(path) else malformed(message, path)
