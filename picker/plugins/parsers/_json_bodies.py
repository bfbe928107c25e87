"""JSON bodies of requests: decoding that refuses with a reason, and typed members.

JavaScript writes half of a character outside the basic plane, as `slice` leaves it, as an escape of
one surrogate (`"\\ud83d"`). RFC 8259 allows it, clients send it and the reference routes it, but
strict readers refuse it. Here it is read as U+FFFD and the rest of its escape (`ud83d`): a marker
that `unmarked` can turn back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from picker.errors import bad_request

T = TypeVar("T")

# Everything that decoding bytes of unknown origin may raise.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_MARK = "\N{REPLACEMENT CHARACTER}".encode()
_ESCAPED_MARK = b"\\ufffd"
_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
# Of the first half of a pair without the second, or of a second without a first: `\\u`.
_LONE_SURROGATE = re.compile(
    rb"\\u(?:(?=%b(?!\\u%b))|(?<!\\u%b\\u)(?=%b))" % (_HIGH, _LOW, _HIGH, _LOW)
)
_MARKED_SURROGATE = re.compile(rb"%b(?=u(?:%b|%b))" % (_MARK, _HIGH, _LOW))

# The decoder's words for what is of another type than it has to be, and JSON's words for the types.
_TYPE_FAULT = re.compile("Expected `(.+?)`, got `(.+?)`")
_KINDS = {
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; of a repeated member the last counts.

    Raises `RefusedError` (400) for anything else.
    """
    return decoded(body, _decode)[0]


def decoded(body: bytes, decode: Callable[[bytes], T]) -> tuple[T, bool]:
    """What `decode` makes of `body`, and whether lone surrogates had to be marked for that.

    Raises `RefusedError` (400) with the reason.
    """
    try:
        return decode(body), False
    except UNREADABLE as error:
        marked = _marked(body)
        if marked is None:
            raise bad_request(f"error unmarshaling request bodyMap: {_reason(error)}") from error
    try:
        return decode(marked), True
    except UNREADABLE as error:
        # Where the fault is in `marked` is not where it is in `body`.
        reason = _reason(error).partition(" (byte ")[0]
        raise bad_request(f"error unmarshaling request bodyMap: {reason}") from error


def unmarked(body: bytes) -> bytes:
    """`body`, JSON written from what was decoded with marks, with the surrogates' escapes again."""
    return _MARKED_SURROGATE.sub(rb"\\", body)


def check_shape(payload: Mapping[str, Any], shape: type[msgspec.Struct], request: str) -> None:
    """Raise `RefusedError` (400) that names the member of `payload` that is not as in `shape`.

    `request` names the kind of request.
    """
    try:
        msgspec.convert(payload, shape)
    except msgspec.ValidationError as error:
        member = str(error).rpartition(" - at `$.")[2].rstrip("`")
        valid = "must have valid messages field: " if member.startswith("messages") else ""
        raise bad_request(f"invalid {request} request: {valid}{_reason(error, member)}") from error


def _marked(body: bytes) -> bytes | None:
    """`body` with its lone surrogates marked; None: there is none.

    Escaped backslashes and the mark itself are written as other escapes first: then every backslash
    begins an escape, and every mark is ours.
    """
    plain = body.replace(b"\\\\", b"\\u005c")
    if not _LONE_SURROGATE.search(plain):
        return None
    return _LONE_SURROGATE.sub(_MARK + b"u", plain.replace(_MARK, _ESCAPED_MARK))


def _reason(error: Exception, subject: str = "it") -> str:
    """What is wrong, in words that say nothing of the decoder."""
    if isinstance(error, UnicodeDecodeError):
        return f"a string in {subject} is not UTF-8"
    if isinstance(error, RecursionError):
        return f"{subject} is nested too deeply"
    fault = _TYPE_FAULT.match(str(error))
    if fault is None:
        return str(error).partition(" - at ")[0]
    expected = [kind for kind in fault[1].split(" | ") if kind != "null"]
    wanted = " or ".join(_KINDS.get(kind, kind) for kind in expected)
    return f"{subject} must be {wanted}, not {_KINDS.get(fault[2], fault[2])}"


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
