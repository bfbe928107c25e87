"""Equal JSON values have equal text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.json_text import json_text, string

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab<é"\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_the_text_decodes_to_the_value(value: object) -> None:
    assert json.loads(json_text(value)) == value


def test_the_order_of_members_does_not_matter() -> None:
    assert json_text({"b": [{"d": 1, "c": 2}], "a": "é<"}) == '{"a":"é<","b":[{"c":2,"d":1}]}'
    assert json_text({"b": 10**30, "a": 1}) == '{"a":1,"b":1000000000000000000000000000000}'


@pytest.mark.parametrize("beside", [(), (10**30,)])
def test_a_value_nested_too_deeply_has_no_text(beside: tuple[int, ...]) -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert json_text([*beside, value]) == ""


@pytest.mark.parametrize(("value", "expected"), [("a", "a"), (1, ""), (None, ""), ([], "")])
def test_other_values_than_strings_are_empty(value: object, expected: str) -> None:
    assert string(value) == expected
