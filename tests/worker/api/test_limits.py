"""What a body may cost, where a broken one is broken, and when memory is short."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.api.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MemoryGuard,
    check_json,
    malformed_json,
    resident_bytes,
)
from worker.errors import RequestError

TEXTS = st.text(alphabet='ab[]{}"\\é\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    """Nesting, the slow way."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(MAX_JSON_DEPTH - 8, MAX_JSON_DEPTH + 4))
def test_depth_is_counted_as_a_parser_would(value: Any, wrapping: int) -> None:
    """Brackets and quotes in strings are text, however they are escaped."""
    for _ in range(wrapping):
        value = [value]
    # A string full of brackets makes the fast way out impossible.
    body = json.dumps([value, "[{" * 70]).encode()
    if depth_of(json.loads(body)) > MAX_JSON_DEPTH:
        with pytest.raises(RequestError, match="nested deeper than 64 levels"):
            check_json(body)
    else:
        check_json(body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.sampled_from([b"[", b'{"', b'"\\', b"]}"]))
def test_any_bytes_are_taken(body: bytes, more: bytes) -> None:
    """Whatever is not JSON is the decoder's to refuse; counting its brackets never fails."""
    for given_bytes in (body, body + more * 100, more * 40 + body):
        with suppress(RequestError):
            check_json(given_bytes)


def test_containers_are_bounded() -> None:
    """A flat body may have so many objects and arrays, and not one more."""
    check_json(b"[" + b",".join([b"{}"] * (MAX_JSON_CONTAINERS - 1)) + b"]")
    with pytest.raises(RequestError, match="65536 objects and arrays"):
        check_json(b"[" + b",".join([b"{}"] * MAX_JSON_CONTAINERS) + b"]")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": "\xff"}', "invalid UTF-8: invalid start byte (byte 7)"),
        (b'{"a": 1', "it ends too early (byte 7)"),
        (b'["\\\\\\ud800"]', "an escaped surrogate without its other half (byte 4)"),
        (b'["\\ud83d\\ude00\\ude00"]', "an escaped surrogate without its other half (byte 14)"),
        (b'["\\ud83d", "\\ude00"]', "an escaped surrogate without its other half (byte 2)"),
        (b'["\\\\ud800", x]', "invalid character (byte 5)"),
    ],
)
def test_the_first_fault_is_named_with_its_place(body: bytes, message: str) -> None:
    """Places count in bytes from 0; an escaped backslash begins no escape."""
    reason = "Input data was truncated" if body.endswith(b"1") else ""
    reason = reason or "JSON is malformed: invalid character (byte 5)"
    assert malformed_json(body, reason).message == f"The body is not valid JSON: {message}"


def test_memory_is_read_now_and_then() -> None:
    """A reading counts for a quarter of a second; without a limit nothing is read."""
    readings = [100, 200, 50]
    now = [0.0]
    guard = MemoryGuard(100, lambda: readings.pop(0), lambda: now[0])
    seen = []
    for now[0] in (0.0, 0.2, 0.25, 0.4, 0.6):
        seen.append(guard.exceeded)
    assert seen == [False, False, True, True, False]
    assert readings == []
    assert MemoryGuard(None, lambda: 1 // 0, lambda: 0.0).exceeded is False


def test_resident_memory_is_plausible() -> None:
    """A Python process has more than a mebibyte and less than a terabyte."""
    assert 1 << 20 < resident_bytes() < 1 << 40
