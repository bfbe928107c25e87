"""round-robin-fairness-policy: one request of each flow in turn, by their ids."""

from typing import Any

import pytest

from picker.plugins.fairness_policies.round_robin_fairness_policy import (
    RoundRobinBand,
    RoundRobinFairnessPolicy,
)
from tests.support.picker.band_queue import Queue


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
