"""The number of reserved places, compared with sums over all requests."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies._burst_headroom import (
    FIRST_DEVIATIONS,
    GRACE_SECONDS,
    MAX_DEVIATIONS,
    MAX_GAPS,
    MEAN_SECONDS,
    MEMORY_SECONDS,
    UNSEEN_SECONDS,
    UNSURE_GAPS,
    CalmLoad,
)
from tests.depth import examples


def steady(load: CalmLoad, rate: float, seconds: float, flow: str = "calm") -> float:
    rng, at, ends = Random(1), 0.0, list[float]()
    while (at := at + rng.expovariate(rate)) < seconds:
        while ends and ends[0] <= at:
            load.ended(flow, True, ends.pop(0))
        load.began(flow, True, at)
        ends.append(at + 0.25)
    for end in ends:
        load.ended(flow, True, end)
    return ends[-1]


def test_no_place_is_reserved_without_calm_flows() -> None:
    load = CalmLoad()
    assert load.places(0.0) == 0
    load.began("flood", False, 1.0)
    assert load.places(1.0) == 0


def test_reserved_places_grow_with_the_root_of_the_load() -> None:
    load = CalmLoad()
    steady(load, 64.0, 20.0)
    load.began("calm", True, 20.3)
    assert load.places(20.3) == pytest.approx(1 + FIRST_DEVIATIONS * 4, rel=0.2)


def test_a_crowd_counts_at_once() -> None:
    load = CalmLoad()
    for _ in range(9):
        load.began("calm", True, 1.0)
    assert load.places(1.0) == 1 + FIRST_DEVIATIONS * 3


def test_an_occasional_flow_has_one_place() -> None:
    load = CalmLoad()
    for second in (0.0, 8.0, 16.0):
        load.began("calm", True, second)
        load.ended("calm", True, second + 0.1)
        assert 1 <= load.places(second + 7.0) < 2
    assert load.places(16.1 + MEMORY_SECONDS) == 0


def test_no_place_is_reserved_for_a_flow_that_left() -> None:
    load = CalmLoad()
    ended = steady(load, 50.0, 5.0)
    assert load.places(ended) > 1
    assert load.places(ended + 0.25) == 0


def test_the_place_of_a_long_request_stays_reserved_after_its_end() -> None:
    """Its client sends the next request when it has the answer."""
    load = CalmLoad()
    for second in (0.0, 60.0, 120.0):
        load.began("agent", True, second)
        assert load.places(second + 59.0) == 0
        load.ended("agent", True, second + 60.0)
        assert load.places(second + 60.0) >= 1


def test_a_forgotten_flow_takes_its_places_along() -> None:
    load = CalmLoad()
    load.began("rare", True, 0.0)
    load.ended("rare", True, 0.1)
    ended = steady(load, 64.0, 5.0)
    load.began("busy", False, ended)
    assert load.places(ended) > 8
    assert 1 <= load.places(ended + 0.5) < 2


def test_pauses_between_bursts_are_no_absence() -> None:
    load = CalmLoad()
    for second in range(5):
        for _ in range(10):
            load.began("calm", True, second)
        for _ in range(10):
            load.ended("calm", True, second + 0.1)
    assert load.places(4.95) > 2
    assert load.places(4.1 + 5.1) == 0


def test_the_mean_of_a_new_flow_begins_with_its_first_request() -> None:
    load = CalmLoad()
    ended = steady(load, 64.0, 1.0)
    load.began("calm", True, ended)
    assert load.places(ended) > 1 + FIRST_DEVIATIONS * 0.75 * 4


def test_a_few_gaps_say_less_than_many() -> None:
    few, many = CalmLoad(), CalmLoad()
    for load, number in ((few, 3), (many, 30)):
        for place in range(number):
            load.began("calm", True, place / 10)
            load.ended("calm", True, place / 10)
    assert few.places(0.2 + 1.3) > 0
    assert many.places(2.9 + 0.6) == 0


def test_no_more_is_reserved_than_calm_flows_leave() -> None:
    load = CalmLoad()
    steady(load, 64.0, 20.0)
    load.began("calm", True, 20.3)
    assert load.places(20.3, 20) == pytest.approx(20 - 16, abs=2)
    assert load.places(20.3, 5) == 1


def test_reserved_places_follow_the_need() -> None:
    load = CalmLoad()
    steady(load, 64.0, 20.0)
    load.began("calm", True, 20.2)
    before = load.places(20.2)
    for number in range(1000):
        load.learn(1.0 if number % 500 == 250 else GRACE_SECONDS)
    assert load.places(20.2) == pytest.approx(before, rel=0.02)
    for _ in range(100):
        load.learn(0.0)
    assert load.places(20.2) < before
    for _ in range(100_000):
        load.learn(0.0)
    assert load.places(20.2) == 1
    load.learn(0.5)
    assert load.places(20.2) == pytest.approx(3, rel=0.1)
    for _ in range(100):
        load.learn(0.5)
    assert load.places(20.2) == pytest.approx(1 + MAX_DEVIATIONS * 4, rel=0.2)


@dataclass
class Known:
    since: float
    number: int = 0
    faded: float = 0.0
    mean: float = 0.0
    is_calm: bool = False
    came: list[float] = field(default_factory=list)
    gone_at: float = 0.0

    def passes(self, seconds: float) -> None:
        remembered = math.exp(-seconds / MEAN_SECONDS)
        self.faded = self.number + (self.faded - self.number) * remembered
        self.mean = self.number + (self.mean - self.number) * remembered

    def seen(self, is_calm: bool, now: float) -> None:
        self.is_calm = is_calm
        self.mean = self.faded / -math.expm1(-(now - self.since + UNSEEN_SECONDS) / MEAN_SECONDS)
        gaps = [two - one for one, two in pairwise(self.came) if two - one < MEMORY_SECONDS]
        weighed = [(gap, 0.99 ** (len(gaps) - 1 - at)) for at, gap in enumerate(gaps)]
        total, number = sum(gap * weight for gap, weight in weighed), sum(one for _, one in weighed)
        squares = sum(gap * gap * weight for gap, weight in weighed)
        patience = MAX_GAPS * (1 + UNSURE_GAPS / number) if number else 0.0
        longest = patience * squares / total if total else MEMORY_SECONDS
        self.gone_at = now + min(MEMORY_SECONDS, longest)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("began", "began", "ended", "forget")),
        st.sampled_from("abc"),
        st.booleans(),
        st.floats(0.0, 3.0),
    ),
    max_size=60,
)


@examples(100)
@given(STEPS)
def test_places_are_for_calm_flows_that_have_not_left(
    steps: list[tuple[str, str, bool, float]],
) -> None:
    load, now, flows = CalmLoad(), 0.0, dict[str, Known]()
    for step, flow, is_calm, seconds in steps:
        now += seconds
        for one in flows.values():
            one.passes(seconds)
        if step == "began":
            load.began(flow, is_calm, now)
            known = flows.setdefault(flow, Known(now))
            known.came.append(now)
            known.seen(is_calm, now)
            known.number += 1
        elif step == "ended":
            load.ended(flow, is_calm, now)
            if flow in flows and flows[flow].number:
                flows[flow].seen(is_calm, now)
                flows[flow].number -= 1
        else:
            load.forget(flow)
            flows.pop(flow, None)
        assert len(load) == len(flows)
        there = [one for one in flows.values() if one.is_calm and one.gone_at > now]
        number, mean = sum(one.number for one in there), sum(one.mean for one in there)
        most = 1 + FIRST_DEVIATIONS * math.sqrt(max(number, mean)) if there else 0.0
        if all(abs(one.gone_at - now) > 1e-6 for one in flows.values()):
            assert load.places(now) == pytest.approx(most, rel=1e-6, abs=1e-3)
