"""Findings survive a round trip through JSON; other JSON is refused."""

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import (
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    ServedModel,
    Topology,
)
from picker.prefix.match import PrefixCacheMatchInfo
from picker.recording.values import KNOWN, NotReplayableError, recordable, restored
from tests.depth import examples

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
COUNTS = st.dictionaries(TEXTS, st.integers(), max_size=4)
LOADS = st.builds(EndpointLoad, st.integers(), st.integers())
FLOATS = st.floats(allow_nan=False)
FINDINGS = st.one_of(
    st.builds(
        PrefixCacheMatchInfo,
        st.integers(),
        st.integers(),
        COUNTS,
        st.dictionaries(TEXTS, COUNTS, max_size=2),
    ),
    st.builds(InFlightLoad, st.dictionaries(TEXTS, LOADS, max_size=4), COUNTS, st.integers()),
    st.dictionaries(
        TEXTS,
        st.builds(LatencyPrediction, FLOATS, FLOATS, FLOATS, FLOATS, st.booleans(), st.integers()),
        max_size=3,
    ),
    st.builds(
        EncoderMatch,
        FLOATS,
        st.dictionaries(TEXTS, FLOATS, max_size=3),
        st.dictionaries(TEXTS, COUNTS, max_size=2),
    ),
    st.builds(Topology, TEXTS, TEXTS, TEXTS, TEXTS),
    st.lists(st.builds(ServedModel, TEXTS, TEXTS, st.integers(), TEXTS, TEXTS)).map(tuple),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), FLOATS, TEXTS, st.binary(max_size=8), FINDINGS
)
HASHABLE = st.one_of(st.integers(), TEXTS, st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(HASHABLE, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | FLOATS
    | TEXTS
    | st.sampled_from(["()", "[]", "{}", "pairs", "float", "int", "bytes", "frozenset", *KNOWN]),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=10,
)


def through_json(value: Any) -> Any:
    return restored(json.loads(json.dumps(recordable(value), allow_nan=False)))


@examples(300)
@given(VALUES)
def test_every_value_survives_a_round_trip(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, frozenset | dict | list | tuple)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2**64, -(2**70)])
def test_numbers_beyond_json_survive_too(value: float) -> None:
    back = through_json(value)
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert type(back) is type(value)


def test_later_changes_of_a_live_view_do_not_change_the_line() -> None:
    loads = {"default/a": EndpointLoad(1, 10)}
    line = recordable(InFlightLoad(MappingProxyType(loads), {}, 5))
    loads["default/a"] = EndpointLoad(2, 20)
    assert restored(line).by_endpoint == {"default/a": EndpointLoad(1, 10)}


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(NotReplayableError, match="complex"):
        recordable({"a": (1, 2j)})


@examples(300)
@given(JSON)
def test_arbitrary_json_is_a_value_or_a_value_error(value: Any) -> None:
    try:
        restored(value)
    except ValueError:
        return
    assert not isinstance(value, dict)
