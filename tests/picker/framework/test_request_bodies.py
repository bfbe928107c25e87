"""What the parsers of JSON bodies share."""

from __future__ import annotations

from typing import Any

import pytest

from picker.errors import RefusedError
from picker.framework.request_bodies import json_object, model_of, text_member, whole_number


def test_an_object_is_decoded() -> None:
    """Of a repeated member the last counts; numbers keep their kind."""
    assert json_object(b'{"a":1,"a":2.0,"b":12345678901234567890123}') == {
        "a": 2.0,
        "b": 12345678901234567890123,
    }


@pytest.mark.parametrize(
    "body", [b"no healthy upstream", b"[]", b"1", b"", b'{"a":' * 9999, b"\xff"]
)
def test_anything_else_is_refused(body: bytes) -> None:
    """With the words of the reference and the reason of the decoder."""
    with pytest.raises(RefusedError, match="error unmarshaling request bodyMap: ") as refusal:
        json_object(body)
    assert refusal.value.status == 400


def test_a_text_member_is_text_or_absent() -> None:
    """Null is as good as absent; another type is named in the refusal."""
    assert text_member({"cache_salt": "s"}, "cache_salt", "chat") == "s"
    assert text_member({"cache_salt": None}, "cache_salt", "chat") == ""
    assert text_member({}, "cache_salt", "chat") == ""
    with pytest.raises(RefusedError, match="invalid chat request: cache_salt must be a string"):
        text_member({"cache_salt": 1}, "cache_salt", "chat")


def test_a_model_of_another_type_is_none() -> None:
    """The director decides what that means."""
    assert model_of({"model": "m"}) == "m"
    assert model_of({"model": 1}) == model_of({}) == ""


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"a": 1, "b": 2}, 1),
        ({"a": -1, "b": 2}, 2),
        ({"a": "1", "b": 2.0}, 2),
        ({"a": True, "b": 1.5}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_the_first_whole_number_counts(payload: Any, expected: int | None) -> None:
    """What is no such number is as good as absent, and so is an object that is none."""
    assert whole_number(payload, ("a", "b")) == expected
