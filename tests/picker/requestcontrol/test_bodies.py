"""Replacing the model of a body, and nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import RefusedError
from picker.requestcontrol.bodies import changes, with_members
from tests.depth import examples

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text("\ud83d\ude00\\u\ufffdd83", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_members_are_sorted_and_compact_as_the_reference_writes_them() -> None:
    """These are the bytes of the reference picker's own hermetic case."""
    body = b'{"model": "my-model", "prompt": "P", "max_tokens": 100, "temperature": 0}'
    expected = b'{"max_tokens":100,"model":"my-model-12345","prompt":"P","temperature":0}'
    assert with_members(body, {"model": "my-model-12345"}) == expected


def test_other_values_keep_their_very_bytes() -> None:
    body = b'{"n":123456789012345678901234567890.10,"deep":{"b": 1,"a" :"\\u00e9"}}'
    assert with_members(body, {"model": 'a"b'}) == (
        b'{"deep":{"b": 1,"a" :"\\u00e9"},"model":"a\\"b","n":123456789012345678901234567890.10}'
    )


@examples(100)
@given(st.dictionaries(st.text(), values, max_size=5), st.text())
def test_every_body_differs_in_its_model_alone(members: dict[str, object], model: str) -> None:
    body = json.dumps(members)
    assert json.loads(with_members(body.encode(), {"model": model})) == {
        **json.loads(body),
        "model": model,
    }


def test_lone_surrogates_keep_their_escapes() -> None:
    raw = "\N{REPLACEMENT CHARACTER}ud83d".encode()
    body = (
        rb"""{"b" : "cut \ud83d", "\uDe00": 1, "a":["\\ud83d\ud83d\ude00", "\\\ude00"], """
        rb""""c":"\\","d":"%b"}""" % raw
    )
    rewritten = with_members(body, {"model": "m"})
    assert rewritten == (
        rb"""{"a":["\u005cud83d\ud83d\ude00", "\u005c\ude00"],"b":"cut \ud83d","c":"\u005c","""
        rb""""d":"\ufffdud83d","model":"m","\uDe00":1}"""
    )
    assert json.loads(rewritten) == {**json.loads(body), "model": "m"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":' * 10_000])
def test_a_body_other_than_a_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(RefusedError) as refusal:
        with_members(body, {"model": "m"})
    assert refusal.value.status == 400


def test_members_are_added_replaced_and_removed_alike() -> None:
    body = b'{"b": 1.0, "a": [1, 2], "c": null}'
    assert with_members(body, {"c": {"d": 1}, "e": "é"}, ["a", "x"]) == (
        '{"b":1.0,"c":{"d":1},"e":"é"}'.encode()
    )


def test_the_last_of_equal_members_is_used() -> None:
    """Readers of the body use the last one, too."""
    assert (
        with_members(b'{"model":"a","n":1,"model":"b","n":2}', {"model": "c"})
        == b'{"model":"c","n":2}'
    )


def test_changes_are_what_is_another_object() -> None:
    deep = {"x": 1}
    before = {"a": deep, "b": 1, "c": 2}
    assert changes(before, {"a": deep, "b": 3, "d": 4}) == ({"b": 3, "d": 4}, ["c"])
