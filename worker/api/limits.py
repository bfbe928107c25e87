"""What a body may cost before anything looks inside it, and where exactly a broken one is broken.

The decoder is strict about syntax, but not about size in its own terms: four mebibytes of brackets
are a million objects. So nesting and the number of containers are counted first, by a few passes of
C string functions over the bytes (a regular expression takes thirty times as long).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from worker.errors import RequestError

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 1 << 16

_MEMORY_REFRESH_SECONDS = 0.25

_OTHER_THAN_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
# As signed bytes: an opening bracket is 1, a closing one -1.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_SURROGATE = re.compile(rb"\\u([dD][89a-fA-F][0-9a-fA-F]{2})")
_BYTE = re.compile(r" \(byte \d+\)")


def check_json(body: bytes) -> None:
    """Refuse a body that nests deeper than `MAX_JSON_DEPTH` or has more than `MAX_JSON_CONTAINERS`
    objects and arrays. Takes any bytes; malformed JSON is left to the decoder.
    """
    containers = body.count(b"{") + body.count(b"[")
    if containers <= MAX_JSON_DEPTH:
        return
    outside = _outside_strings(body)
    if outside.count(b"{") + outside.count(b"[") > MAX_JSON_CONTAINERS:
        raise RequestError(f"The body has more than {MAX_JSON_CONTAINERS} objects and arrays")
    brackets = outside.translate(_STEPS, _OTHER_THAN_BRACKETS)
    if max(accumulate(memoryview(brackets).cast("b")), default=0) > MAX_JSON_DEPTH:
        raise RequestError(f"The body is nested deeper than {MAX_JSON_DEPTH} levels")


def _outside_strings(body: bytes) -> bytes:
    """The bytes that are not inside of strings."""
    if b"\\" in body:
        # Left to right, so that of a run of backslashes only the last odd one escapes the quote.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def malformed_json(body: bytes, reason: str) -> RequestError:
    """The 400 for a body the decoder refused as JSON, with the place (counted in bytes from 0).
    `reason` is the decoder's own; where another one comes first or says more, it is told instead.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return _malformed(f"invalid UTF-8: {error.reason}", error.start)
    place = _lone_surrogate(body)
    if place is not None:
        return _malformed("an escaped surrogate without its other half", place)
    if "truncated" in reason:
        return _malformed("it ends too early", len(body))
    found = _BYTE.search(reason)
    place = int(found.group()[7:-1]) if found else None
    return _malformed(_BYTE.sub("", reason).removeprefix("JSON is malformed: "), place)


def _malformed(reason: str, place: int | None) -> RequestError:
    where = "" if place is None else f" (byte {place})"
    return RequestError(f"The body is not valid JSON: {reason}{where}")


def _lone_surrogate(body: bytes) -> int | None:
    """Where the first escaped surrogate begins that is not one of a pair."""
    high_end = None  # where the other half of a pair has to begin
    high_start = 0
    for found in _SURROGATE.finditer(body.replace(b"\\\\", b"__")):
        is_high = found.group(1)[1:2].lower() < b"c"
        if high_end is not None:
            if is_high or found.start() != high_end:
                return high_start
            high_end = None
        elif not is_high:
            return found.start()
        else:
            high_start, high_end = found.span()
    return None if high_end is None else high_start


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MemoryGuard:
    """Tells whether this process has outgrown its limit. Owns the last reading, which is used for a
    quarter of a second. `clock` is monotonic; `limit_bytes` None: never.
    """

    def __init__(
        self, limit_bytes: int | None, read: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._limit = limit_bytes
        self._read = read
        self._clock = clock
        self._read_at: float | None = None
        self._last = 0

    @property
    def exceeded(self) -> bool:
        """The limit is exceeded now, or was a moment ago."""
        if self._limit is None:
            return False
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _MEMORY_REFRESH_SECONDS:
            self._read_at, self._last = now, self._read()
        return self._last > self._limit
