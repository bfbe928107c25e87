"""JSON bodies of requests: decoding that refuses with a reason, and reading of members.

If `slice` cuts a character outside the basic plane in half, JavaScript writes the half as an escape
of one surrogate (`"\\ud83d"`). RFC 8259 allows this, clients send it and the reference routes it,
but strict readers refuse it. Here it is read as U+FFFD and the rest of its escape (`ud83d`): a mark
that `unmarked` can turn back.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from picker.errors import Code, RefusedError, bad_request
from picker.tokenization.json_text import json_text

T = TypeVar("T")

# Everything that decoding bytes of unknown origin may raise.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_MARK = "\N{REPLACEMENT CHARACTER}".encode()
_ESCAPED_MARK = b"\\ufffd"
_HIGH, _LOW = rb"[dD][89abAB][0-9a-fA-F]{2}", rb"[dD][c-fC-F][0-9a-fA-F]{2}"
# The `\\u` of a first half of a pair without the second, or of a second without the first.
_LONE_SURROGATE = re.compile(
    rb"\\u(?:(?=%b(?!\\u%b))|(?<!\\u%b\\u)(?=%b))" % (_HIGH, _LOW, _HIGH, _LOW)
)
_MARKED_SURROGATE = re.compile(rb"%b(?=u(?:%b|%b))" % (_MARK, _HIGH, _LOW))

# The decoder's words for other values than objects, and JSON's words for the types.
_TYPE_FAULT = re.compile("Expected `object`, got `(.+?)`")
_MALFORMED, _TRUNCATED = "JSON is malformed: ", "Input data was truncated"
_KINDS = {
    "str": "a string",
    "int": "a number",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
}


def json_object(body: bytes) -> dict[str, Any]:
    """Decode an object; the last of repeated members counts. Raises `RefusedError` (400)."""
    return decoded(body, _decode)[0]


def decoded(body: bytes, decode: Callable[[bytes], T]) -> tuple[T, bool]:
    """Decode `body`, and say whether lone surrogates were marked. Raises `RefusedError` (400)."""
    try:
        return decode(body), False
    except UNREADABLE as error:
        # Marking takes a pass over the body, so it is tried only after a failure.
        marked = _marked(body)
        if marked is None:
            raise _refusal(_reason(error)) from error
    try:
        return decode(marked), True
    except UNREADABLE as error:
        # The position of the fault in `marked` differs from that in `body`.
        raise _refusal(_reason(error).partition(" (byte ")[0]) from error


def unmarked(body: bytes) -> bytes:
    """Return JSON that was written from a marked body, with the escapes of surrogates restored."""
    return _MARKED_SURROGATE.sub(rb"\\", body)


def unreadable(headers: Mapping[str, str], body: bytes, refusal: RefusedError) -> RefusedError:
    """Return a refusal with the real cause for a body that is not JSON, else `refusal`."""
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        text = f"the request body is compressed ({coding}), so that its model cannot be read"
        return RefusedError(Code.UNSUPPORTED_MEDIA_TYPE, f"{text}; send it without that coding")
    if not body:
        return bad_request("the request body is empty, so that it names no model")
    media_type = media_type_of(headers)
    if not media_type or media_type.endswith("json") or body.lstrip().startswith(b"{"):
        return refusal
    text = f"the request body is {media_type}, so that its model cannot be read; send JSON"
    return bad_request(text, reference=refusal.reference)


def media_type_of(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _marked(body: bytes) -> bytes | None:
    """Return `body` with its lone surrogates marked; None if it has none.

    Escaped backslashes and the mark itself are first written as other escapes, so that every
    backslash begins an escape, and every mark was written by this module.
    """
    plain = body.replace(b"\\\\", b"\\u005c")
    if not _LONE_SURROGATE.search(plain):
        return None
    return _LONE_SURROGATE.sub(_MARK + b"u", plain.replace(_MARK, _ESCAPED_MARK))


def _refusal(reason: str) -> RefusedError:
    return bad_request(
        f"the request body cannot be read as JSON: {reason.removeprefix(_MALFORMED)}",
        reference=f"error unmarshaling request bodyMap: {reason}",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "a string in it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    fault = _TYPE_FAULT.match(str(error))
    if fault is None:
        reason = str(error).partition(" - at ")[0]
        return "it ends too early" if reason == _TRUNCATED else reason
    return f"it must be an object, not {_KINDS.get(fault[1], fault[1])}"


def salt_of(payload: Mapping[str, Any], name: str) -> str:
    """Return the cache salt, "" for none; a value other than a string also separates prompts."""
    value = payload.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else json_text(value)


def model_of(payload: Mapping[str, Any]) -> str:
    model = payload.get("model")
    return model if isinstance(model, str) else ""


def whole_number(payload: object, names: tuple[str, ...]) -> int | None:
    """Return the first of the members `names` that is a whole number of at least zero, such as 5,
    1e3 or 5.0. None if there is none, or if `payload` is not an object.
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
