"""Limits on a JSON body, checked before it is decoded, and the place of the fault in broken JSON.

The counting uses C string functions: a regular expression takes thirty times as long.
"""

import re
from itertools import accumulate

from worker.api.http.field_errors import malformed
from worker.errors import RequestError

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 1 << 16
MAX_JSON_MEMBERS = 1 << 16

_OTHER_THAN_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
# As signed bytes: an opening bracket is 1, a closing one -1.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ESCAPE_BYTES = 6
# One after which so little comes that the decoder cannot look for its other half; and what comes is
# not the beginning of that.
_HIGH_SURROGATE_AT_END = re.compile(
    _HIGH_SURROGATE.pattern + rb"(?!\\(?:u[0-9a-fA-F]*)?\Z)(?s:.){0,5}\Z"
)
_BYTE = re.compile(r" \(byte \d+\)")


def check_json(body: bytes) -> None:
    """Refuse a body with too many levels, containers or members; broken JSON may pass."""
    containers = body.count(b"{") + body.count(b"[")
    # Brackets in strings count too, so this is an upper bound: the usual body costs no copy.
    if containers <= MAX_JSON_DEPTH and body.count(b":") <= MAX_JSON_MEMBERS:
        return
    outside = _outside_strings(body)
    if outside.count(b":") > MAX_JSON_MEMBERS:
        raise malformed(f"The objects of the body have more than {MAX_JSON_MEMBERS} members")
    if _num_containers(outside) > MAX_JSON_CONTAINERS:
        raise malformed(f"The body has more than {MAX_JSON_CONTAINERS} objects and arrays")
    brackets = outside.translate(_STEPS, _OTHER_THAN_BRACKETS)
    if max(accumulate(memoryview(brackets).cast("b")), default=0) > MAX_JSON_DEPTH:
        raise malformed(f"The body is nested deeper than {MAX_JSON_DEPTH} levels")


def num_containers(text: str) -> int:
    """Count the objects and arrays of a JSON text; a decoder creates no more than these."""
    return _num_containers(_outside_strings(text.encode()))


def _num_containers(outside_strings: bytes) -> int:
    return outside_strings.count(b"{") + outside_strings.count(b"[")


def _outside_strings(body: bytes) -> bytes:
    if b"\\" in body:
        # Left to right, so that of a run of backslashes only the last odd one escapes the quote.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def malformed_json(body: bytes, reason: str) -> RequestError:
    """Return the 400 for broken JSON, with the first fault and its place in bytes."""
    if not body:
        return malformed("The body is empty")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return _malformed(f"invalid UTF-8: {error.reason}", error.start)
    found = _BYTE.search(reason)
    place = int(found.group()[7:-1]) if found else None
    surrogate = _lone_surrogate(body, reason, place)
    if surrogate is not None:
        return _malformed("an escaped surrogate without its other half", surrogate)
    if "truncated" in reason:
        return _malformed("it ends too early", len(body))
    return _malformed(_BYTE.sub("", reason).removeprefix("JSON is malformed: "), place)


def _malformed(reason: str, place: int | None) -> RequestError:
    if place is None:
        return malformed(f"The body is not valid JSON: {reason}")
    return malformed(f"The body is not valid JSON: {reason} (byte {place})", str(place))


def _lone_surrogate(body: bytes, reason: str, place: int | None) -> int | None:
    """Return the position of the escaped surrogate that stopped the decoder at `place` because its
    other half is missing; None if there is none. Only the text just before `place` is checked: a
    body may have a million surrogates.
    """
    if place is not None and "surrogate" in reason:
        last = place - _ESCAPE_BYTES
        alone = "unexpected end" in reason or _LOW_SURROGATE.match(body, last)
        return last if alone else last - _ESCAPE_BYTES
    if "truncated" not in reason:
        return None
    found = _HIGH_SURROGATE_AT_END.search(body, max(0, len(body) - 2 * _ESCAPE_BYTES + 1))
    if found is None:
        return None
    before = body[: found.start()]
    num_backslashes = len(before) - len(before.rstrip(b"\\"))
    return None if num_backslashes % 2 else found.start()
