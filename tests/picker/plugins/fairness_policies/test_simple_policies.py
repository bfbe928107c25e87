"""Fairness policies without weights: one request of each flow in turn, and the best head of all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies.simple_policies import (
    GlobalStrictBand,
    RoundRobinBand,
    RoundRobinFairnessPolicy,
)
from tests.depth import examples
from tests.support.picker.band_queue import Queue
from tests.support.picker.plugin_scenes import queued


@pytest.fixture
def band() -> Any:
    return Queue(RoundRobinFairnessPolicy().for_band(0))


def test_a_full_queue_is_shared_equally() -> None:
    policy = RoundRobinFairnessPolicy().for_band(0)
    assert policy.weight("a") == policy.weight("b") == 1.0


def test_flows_take_turns_by_their_ids(band: Any) -> None:
    for flow in "cabbbac":
        band.push(flow)
    assert band.drain() == "abcabcb"


def test_a_flow_that_comes_back_has_its_turn_unless_its_place_has_passed(band: Any) -> None:
    for flow in "abc":
        band.push(flow)
    assert band.drain() == "abc"
    for flow in "bb":
        band.push(flow)
    assert band.dispatch().flow == "b"
    band.push_all("ac")
    assert band.drain() == "cab"


def test_invented_ids_deprive_no_flow_of_its_turn(band: Any) -> None:
    for flow in ("a", "z"):
        band.push(flow)
    served = []
    for made_up in range(5):
        band.push(f"b{made_up}")
        served.append(band.dispatch().flow)
    assert served.index("z") <= 2


def test_a_flow_waits_for_two_turns_of_each_other_at_most(band: Any) -> None:
    for flow in "abcdefgh":
        band.push(flow)
        band.push(flow)
    for _ in range(5):
        flow = band.dispatch().flow
        band.push(flow)
    band.push("aa")
    turns = 1
    while band.dispatch().flow != "aa":
        turns += 1
        band.push_all("bc")
    assert turns <= 2 * 9


def test_a_forgotten_flow_is_a_new_one() -> None:
    band = RoundRobinBand()
    band.forget("nobody")
    assert band.select(0.0) is None


def test_the_first_of_equal_ranks_goes_first() -> None:
    band = GlobalStrictBand()
    first, second = queued("z"), queued("a")
    band.head_changed("a", second, (1.0,))
    band.head_changed("z", first, (1.0,))
    assert band.select(0.0) == "z"
    band.head_changed("z", None, ())
    assert band.select(0.0) == "a"


@examples(60)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 5)), max_size=60
    )
)
def test_a_selection_equals_a_search_of_all_heads(changes: list[tuple[str, int | None]]) -> None:
    band, heads = GlobalStrictBand(), dict[str, Any]()
    for flow, rank in changes:
        if rank is None:
            heads.pop(flow, None)
            band.head_changed(flow, None, ())
        else:
            head = queued(flow)
            heads[flow] = ((float(rank),), head.sequence)
            band.head_changed(flow, head, (float(rank),))
        assert band.select(0.0) == min(heads, key=heads.__getitem__, default=None)
