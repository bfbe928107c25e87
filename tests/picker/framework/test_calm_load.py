"""How many places are kept for whom, against sums over all requests."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.framework.calm_load import (
    FIRST_DEVIATIONS,
    GRACE_SECONDS,
    MEAN_SECONDS,
    MEMORY_SECONDS,
    MOST_DEVIATIONS,
    CalmLoad,
)


def steady(load: CalmLoad, rate: float, seconds: float, flow: str = "calm") -> float:
    """Requests at random that last a quarter of a second; returns the time at which the last of
    them ended.
    """
    rng, at, ends = Random(1), 0.0, list[float]()
    while (at := at + rng.expovariate(rate)) < seconds:
        while ends and ends[0] <= at:
            load.ended(flow, True, ends.pop(0))
        load.began(flow, True, at)
        ends.append(at + 0.25)
    for end in ends:
        load.ended(flow, True, end)
    return ends[-1]


def test_nothing_is_kept_for_nobody() -> None:
    """Nor for those who use more than their share."""
    load = CalmLoad()
    assert load.places(0.0) == 0
    load.began("flood", False, 1.0)
    assert load.places(1.0) == 0


def test_bursts_are_some_roots_of_what_is_under_way() -> None:
    """Of 16 on the average, a place and 2.5 times four of them, before anything is known."""
    load = CalmLoad()
    steady(load, 64.0, 20.0)
    load.began("calm", True, 20.3)
    assert load.places(20.3) == pytest.approx(1 + FIRST_DEVIATIONS * 4, rel=0.2)


def test_a_crowd_counts_at_once() -> None:
    """Not only when it has become the mean of some seconds."""
    load = CalmLoad()
    for _ in range(9):
        load.began("calm", True, 1.0)
    assert load.places(1.0) == 1 + FIRST_DEVIATIONS * 3


def test_whoever_asks_now_and_then_has_one_place() -> None:
    """For ten seconds after the last time; also between two requests."""
    load = CalmLoad()
    for second in (0.0, 8.0, 16.0):
        load.began("calm", True, second)
        load.ended("calm", True, second + 0.1)
        assert 1 <= load.places(second + 7.0) < 2
    assert load.places(16.1 + MEMORY_SECONDS) == 0


def test_nothing_is_kept_for_those_who_have_gone() -> None:
    """Whoever asked many times a second and does no more is soon known to have gone."""
    load = CalmLoad()
    ended = steady(load, 50.0, 5.0)
    assert load.places(ended) > 1
    assert load.places(ended + 0.25) == 0


def test_one_place_is_kept_for_those_who_are_still_served() -> None:
    """They may come again when that is over; bursts of them are not to be feared."""
    load = CalmLoad()
    ended = steady(load, 50.0, 5.0)
    load.began("calm", True, ended)
    assert load.places(ended + 60.0) == 1


def test_pauses_between_bursts_are_no_absence() -> None:
    """Ten requests at once every second are looked forward to."""
    load = CalmLoad()
    for second in range(5):
        for _ in range(10):
            load.began("calm", True, second)
        for _ in range(10):
            load.ended("calm", True, second + 0.1)
    assert load.places(4.95) > 2
    assert load.places(4.1 + 3.1) == 0


def test_as_much_is_kept_as_was_needed() -> None:
    """It balances where one request in two hundred waits, and it has limits."""
    load = CalmLoad()
    steady(load, 64.0, 20.0)
    load.began("calm", True, 20.2)
    before = load.places(20.2)
    for number in range(400):
        load.learn(1.0 if number % 200 == 100 else GRACE_SECONDS)
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
    assert load.places(20.2) == pytest.approx(1 + MOST_DEVIATIONS * 4, rel=0.2)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("began", "began", "ended", "forget")),
        st.sampled_from("abc"),
        st.booleans(),
        st.floats(0.0, 2.0),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_what_is_under_way_is_that_of_those_who_are_calm(
    steps: list[tuple[str, str, bool, float]],
) -> None:
    """The mean of each, faded over three seconds, whatever they were before."""
    load, now = CalmLoad(), 0.0
    flows: dict[str, tuple[int, float, bool]] = {}  # under way, mean, whether it is calm
    for step, flow, is_calm, seconds in steps:
        now += seconds
        faded = math.exp(-seconds / MEAN_SECONDS)
        flows = {one: (n, n + (mean - n) * faded, calm) for one, (n, mean, calm) in flows.items()}
        known = flows.get(flow)
        if step == "began":
            load.began(flow, is_calm, now)
            number, mean, _ = known or (0, 0.0, False)
            flows[flow] = (number + 1, mean, is_calm)
        elif step == "ended":
            load.ended(flow, is_calm, now)
            if known is not None:
                flows[flow] = (max(0, known[0] - 1), known[1], is_calm)
        else:
            load.forget(flow)
            flows.pop(flow, None)
        assert len(load) == len(flows)
        number = sum(n for n, _, calm in flows.values() if calm)
        mean = sum(one for _, one, calm in flows.values() if calm)
        told = load.places(now)
        if told > 1:
            assert told == pytest.approx(
                1 + FIRST_DEVIATIONS * math.sqrt(max(number, mean)), rel=1e-6, abs=1e-3
            )
        elif told:
            assert number or mean < 1e-6
        else:
            assert not number
