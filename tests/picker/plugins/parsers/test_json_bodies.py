"""The common part of the parsers of JSON bodies."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.plugins.parsers._json_bodies import (
    json_object,
    model_of,
    salt_of,
    unreadable,
    whole_number,
)


def test_an_object_is_decoded() -> None:
    assert json_object(b'{"a":1,"a":2.0,"b":12345678901234567890123}') == {
        "a": 2.0,
        "b": 12345678901234567890123,
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no healthy upstream", "invalid character (byte 4)"),
        (b"", "it ends too early"),
        (b'{"a":1', "it ends too early"),
        (b'{"a":1} {}', "trailing characters (byte 9)"),
        (b"\xff\xfe{", "invalid character (byte 0)"),
        (b"\xef\xbb\xbf{}", "invalid character (byte 0)"),
        (b"[]", "it must be an object, not a list"),
        (b"1", "it must be an object, not a number"),
        (b"1.5", "it must be an object, not a number"),
        (b"true", "it must be an object, not a boolean"),
        (b'"a"', "it must be an object, not a string"),
        (b"null", "it must be an object, not null"),
        (b'{"a":"\xff"}', "a string in it is not UTF-8"),
        (b'{"a":"\xed\xa0\xbd"}', "a string in it is not UTF-8"),
        (b'{"\xff":1}', "a string in it is not UTF-8"),
        (b'{"a":' * 199_999, "it is nested too deeply"),
        (b"[" * 9999, "it must be an object, not a list"),
        (b'{"a":NaN}', "invalid character (byte 5)"),
        (b'{"a":1e999}', "Number out of range"),
        (b'{"a":' + b"1" * 9999 + b"}", "Integer value out of range"),
        (b'{"a":"\\ud83"}', "invalid character in unicode escape (byte 12)"),
        (b'{"a":"\\ud83d\\udxyz"}', "invalid character in unicode escape"),
        (b'{"a":"\\ud83d",}', "trailing comma in object"),
        (b'{"a":"\\ud83d","b":"\xff"}', "a string in it is not UTF-8"),
        (b'{"b":"\\ud83d","a":' + b'{"a":' * 199_999, "it is nested too deeply"),
        (b'\\ud83d{"a":1}', "invalid character"),
    ],
)
def test_another_body_is_refused(body: bytes, reason: str) -> None:
    """The text does not depend on Python; the reference's text is there for conformance."""
    with pytest.raises(RefusedError) as refusal:
        json_object(body)
    assert refusal.value.status == 400
    text = f"the request body cannot be read as JSON: {reason}"
    assert refusal.value.message == text if reason.endswith(")") else text in refusal.value.message
    assert refusal.value.reference_body.startswith(
        "inference error: BadRequest - error unmarshaling request bodyMap: "
    )


@pytest.mark.parametrize(
    ("escaped", "read"),
    [
        (r"\ud83d", "\N{REPLACEMENT CHARACTER}ud83d"),
        (r"cut \uD83D.", "cut \N{REPLACEMENT CHARACTER}uD83D."),
        (r"\ude00", "\N{REPLACEMENT CHARACTER}ude00"),
        (r"\ud83d\ud83d", "\N{REPLACEMENT CHARACTER}ud83d\N{REPLACEMENT CHARACTER}ud83d"),
        (r"\ud83d\ud83d\ude00", "\N{REPLACEMENT CHARACTER}ud83d\N{GRINNING FACE}"),
        (r"\ud83d\ude00\ude00", "\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}ude00"),
        (r"\ude00\ud83d", "\N{REPLACEMENT CHARACTER}ude00\N{REPLACEMENT CHARACTER}ud83d"),
        (r"\ud83d\u0041", "\N{REPLACEMENT CHARACTER}ud83dA"),
        (r"\ud83d\\ude00", "\N{REPLACEMENT CHARACTER}ud83d\\ude00"),
        (r"\\\ud83d", "\\\N{REPLACEMENT CHARACTER}ud83d"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\\ud83d\ud83d", r"\\ud83d" + "\N{REPLACEMENT CHARACTER}ud83d"),
    ],
)
def test_a_lone_surrogate_is_read_as_a_replacement(escaped: str, read: str) -> None:
    body = f'{{"{escaped}":["{escaped}"]}}'.encode()
    assert json_object(body) == {read: [read]}


units = st.sampled_from(["\ud83d", "\udbff", "\ude00", "\\", "u", "ud83d", "d83d", "a", "\ufffd"])


@given(st.lists(units))
def test_halves_and_pairs_of_surrogates_are_distinguished_anywhere(parts: list[str]) -> None:
    """The standard library's reader joins pairs and leaves halves, and is the reference."""
    body = json.dumps({"a": "".join(parts)}).encode()
    expected = json.loads(body)["a"]
    for code in (0xD83D, 0xDBFF, 0xDE00):
        expected = expected.replace(chr(code), "\N{REPLACEMENT CHARACTER}" + f"u{code:x}")
    assert json_object(body) == {"a": expected}


GZIP = {"content-type": "application/json", "content-encoding": "gzip"}
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("headers", "body", "status", "text"),
    [
        (GZIP, b"\x1f\x8b\x08", 415, "the request body is compressed (gzip), so that its model"),
        ({"content-encoding": "identity"}, b"{", 400, "cannot be read as JSON: it ends too early"),
        ({}, b"", 400, "the request body is empty"),
        ({"content-type": "text/csv; a=b"}, b"a,b", 400, "the request body is text/csv, so that"),
        (FORM, b' {"model"', 400, "cannot be read as JSON: it ends too early"),
        (
            {"content-type": "application/problem+json"},
            b"x",
            400,
            "read as JSON: invalid character",
        ),
    ],
)
def test_a_refusal_names_the_real_cause(
    headers: dict[str, str], body: bytes, status: int, text: str
) -> None:
    """curl states a form whatever it sends."""
    with pytest.raises(RefusedError) as refusal:
        json_object(body)
    named = unreadable(headers, body, refusal.value)
    assert named.status == status
    assert text in named.message


@pytest.mark.parametrize(
    ("value", "salt"), [("s", "s"), (None, ""), (1, "1"), (["b", "a"], '["b","a"]'), ({}, "{}")]
)
def test_every_salt_separates_prompts(value: object, salt: str) -> None:
    """To ignore one would share cached prefixes between tenants that asked not to."""
    assert salt_of({"cache_salt": value}, "cache_salt") == salt
    assert salt_of({}, "cache_salt") == ""


def test_a_model_of_another_type_is_none() -> None:
    assert model_of({"model": "m"}) == "m"
    assert model_of({"model": 1}) == model_of({}) == ""


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"a": 1, "b": 2}, 1),
        ({"a": 0, "b": 2}, 0),
        ({"a": None, "b": 2}, 2),
        ({"a": -1, "b": 2}, 2),
        ({"a": "1", "b": 2.0}, 2),
        ({"a": True, "b": 1.5}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_the_first_whole_number_counts(payload: Any, expected: int | None) -> None:
    assert whole_number(payload, ("a", "b")) == expected
