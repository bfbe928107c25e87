"""Token ids are packed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.token_ids import pack_token_ids


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_every_token_is_four_bytes_little_endian(ids: list[int]) -> None:
    assert pack_token_ids(ids) == b"".join(one.to_bytes(4, "little") for one in ids)


@pytest.mark.parametrize(
    "value",
    [[], [-1], [2**32], [10**30], [1.0], [True], [1, "2"], [[1]], [None], "1", None, {1: 2}],
)
def test_other_values_are_not_token_ids(value: object) -> None:
    """A bool is an int to Python, but not to JSON."""
    assert pack_token_ids(value) is None
