"""Token ids packed."""

from __future__ import annotations

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
def test_anything_else_is_no_list_of_token_ids(value: object) -> None:
    """Also what Python takes for an integer though JSON does not."""
    assert pack_token_ids(value) is None
