"""Bodies are refused by their structure before decoding, and the place of a fault is named."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.api.http.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_MEMBERS,
    check_json,
    malformed_json,
)
from worker.errors import RequestError

TEXTS = st.text(alphabet='ab[]{}"\\é\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@examples(200)
@given(VALUES, st.integers(MAX_JSON_DEPTH - 8, MAX_JSON_DEPTH + 4))
def test_depth_is_counted_as_a_parser_would(value: Any, wrapping: int) -> None:
    for _ in range(wrapping):
        value = [value]
    # A string full of brackets makes the fast way out impossible.
    body = json.dumps([value, "[{" * 70]).encode()
    if depth_of(json.loads(body)) > MAX_JSON_DEPTH:
        with pytest.raises(RequestError, match="nested deeper than 64 levels"):
            check_json(body)
    else:
        check_json(body)


def test_the_members_of_objects_are_counted() -> None:
    most = {str(n): 0 for n in range(MAX_JSON_MEMBERS)}
    check_json(json.dumps(most).encode())
    check_json(json.dumps([":" * MAX_JSON_MEMBERS, most]).encode())
    with pytest.raises(RequestError, match="more than 65536 members"):
        check_json(json.dumps({**most, "more": 0}).encode())


@examples(200)
@given(st.binary(max_size=64), st.sampled_from([b"[", b'{"', b'"\\', b"]}"]))
def test_any_bytes_are_taken(body: bytes, more: bytes) -> None:
    for given_bytes in (body, body + more * 100, more * 40 + body):
        with suppress(RequestError):
            check_json(given_bytes)


def test_containers_are_bounded() -> None:
    check_json(b"[" + b",".join([b"{}"] * (MAX_JSON_CONTAINERS - 1)) + b"]")
    with pytest.raises(RequestError, match="65536 objects and arrays"):
        check_json(b"[" + b",".join([b"{}"] * MAX_JSON_CONTAINERS) + b"]")


LONE = "an escaped surrogate without its other half"


def refusal(body: bytes) -> RequestError:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as caught:
        msgspec.json.decode(body)
    return malformed_json(body, str(caught.value))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": "\xff"}', "invalid UTF-8: invalid start byte (byte 7)"),
        (b'{"a": 1', "it ends too early (byte 7)"),
        (b'["\\\\\\ud800"]', f"{LONE} (byte 4)"),
        (b'["\\\\\\ud800 and more"]', f"{LONE} (byte 4)"),
        (b'["\\ud800\\n"]', f"{LONE} (byte 2)"),
        (b'["\\ud83d\\u0041 and more"]', f"{LONE} (byte 2)"),
        (b'["\\ud83d\\ud83d\\ude00"]', f"{LONE} (byte 2)"),
        (b'["\\\\ud83d\\ude00"]', f"{LONE} (byte 9)"),
        (b'["\\ud83d\\ude00\\ude00"]', f"{LONE} (byte 14)"),
        (b'["\\ud83d", "\\ude00"]', f"{LONE} (byte 2)"),
        (b'["\\ud83d\\ude0', "it ends too early (byte 13)"),
        (b'["\\ud83d\\ude00', "it ends too early (byte 14)"),
        (b'["\\\\ud800', "it ends too early (byte 9)"),
        (b'["\\\\ud800", x]', "invalid character (byte 12)"),
    ],
)
def test_the_first_fault_is_named_with_its_place(body: bytes, message: str) -> None:
    assert refusal(body).message == f"The body is not valid JSON: {message}"


class Sliced(bytes):
    """A body that counts the bytes that are cut out of it or replaced."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        Sliced.copied += len(part) if isinstance(part, bytes) else 1
        return part

    def replace(self, *arguments: Any) -> bytes:
        Sliced.copied += len(self)
        return super().replace(*arguments)


@pytest.mark.parametrize("end", [b"", b'\\ud83d x y z"]', b'\\ude00"]'])
def test_a_broken_body_is_not_searched_for_surrogates(end: bytes) -> None:
    Sliced.copied = 0
    body = Sliced(b'["' + b"\\ud83d\\ude00" * 1000 + end)
    assert ("surrogate" in refusal(body).message) is bool(end)
    assert Sliced.copied < 100
