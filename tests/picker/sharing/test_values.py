"""Attributes of endpoints come out of msgpack as they went in."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.framework.findings import Topology
from picker.framework.served_models import ServedModel
from picker.sharing.values import restored, shareable

TEXT = st.text(max_size=5)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=5)
)
FINDINGS = (
    SCALARS
    | st.builds(Topology, TEXT, TEXT, TEXT, TEXT)
    | st.builds(ServedModel, TEXT, TEXT, st.integers(0, 9), TEXT, TEXT)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    FINDINGS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(SCALARS, max_size=3)
        | st.dictionaries(TEXT, inner, max_size=3).map(MappingProxyType)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    """With their types, however they are nested."""
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(shareable(value)))
    assert restored(carried) == value
    assert type(restored(carried)) is type(value)


def test_a_type_that_nobody_has_listed_is_refused() -> None:
    """Rather than to come back as something else."""
    with pytest.raises(TypeError, match="a complex cannot be shared"):
        shareable((1, 2j))
