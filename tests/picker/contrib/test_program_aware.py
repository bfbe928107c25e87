"""program-aware-fairness: least attained service, deep sessions and long waits."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.contrib.program_aware import (
    MAX_PROGRAMS,
    ProgramAwareFairness,
    ProgramAwareFairnessParameters,
)
from picker.framework.flow import QueuedRequest, SharesByProgram
from picker.types import DEFAULT_FAIRNESS_ID, Api, InferenceRequest, ParsedBody, Usage
from tests.depth import examples
from tests.support.picker.band_queue import Queue
from tests.support.picker.configured_requests import routing

HALF_LIFE = 60.0


def _policy(**parameters: Any) -> ProgramAwareFairness:
    return ProgramAwareFairness(ProgramAwareFairnessParameters(**parameters))


def _serve(band: Any, program: str, usage: Usage) -> None:
    band.push(program)
    band.complete(band.dispatch(), usage)


def test_the_least_served_program_goes_first() -> None:
    band = Queue(_policy().for_band(0))
    _serve(band, "a", Usage(100, 10))
    _serve(band, "b", Usage(10, 60))
    _serve(band, "c", Usage(0, 10))
    band.push_all("bac")
    assert band.drain() == "cab"


def test_without_service_the_longest_wait_decides_and_then_the_id() -> None:
    band = Queue(_policy().for_band(0))
    for program, at in (("c", 2.0), ("b", 1.0), ("d", 2.0), ("a", 2.0)):
        band.now = at
        band.push(program)
    assert band.drain() == "bacd"


def test_service_fades() -> None:
    band = Queue(_policy().for_band(0))
    for begun in (0.0, 400.0 * HALF_LIFE, 10_000.0 * HALF_LIFE):
        band.now = begun
        _serve(band, "a", Usage(1000, 0))
        band.now = begun + 10 * HALF_LIFE
        _serve(band, "b", Usage(10, 0))
        band.push_all("ba")
        assert band.drain() == "ab"


def test_a_program_is_the_same_in_all_bands() -> None:
    policy = _policy()
    one, other = Queue(policy.for_band(1)), Queue(policy.for_band(0))
    _serve(one, "a", Usage(100, 0))
    other.push("a")
    other.push("b")
    assert other.drain() == "ba"


def test_programs_are_forgotten() -> None:
    policy = _policy(las_half_life_seconds=1e6)
    band = Queue(policy.for_band(0))
    _serve(band, "big", Usage(1000, 0))
    band.push("small")
    band.complete(band.dispatch())
    band.now = 3500.0
    _serve(band, "other", Usage(1, 1))
    assert set(policy.program_shares()) == {"big", "small", "other"}
    band.now = 3700.0
    _serve(band, "other", Usage(1, 1))
    assert set(policy.program_shares()) == {"big", "small", "other"}
    band.now = 3900.0
    _serve(band, "other", Usage(1, 1))
    assert set(policy.program_shares()) == {"other"}


def _turns(**parameters: Any) -> ProgramAwareFairness:
    return _policy(strategy="turn-priority", **parameters)


def _take_turns(band: Any, program: str, number: int) -> None:
    for _ in range(number):
        _serve(band, program, Usage(100, 100))


def test_the_deepest_session_goes_first() -> None:
    policy = _turns()
    band, other = Queue(policy.for_band(0)), Queue(policy.for_band(-1))
    _take_turns(band, "a", 1)
    _take_turns(other, "b", 3)
    band.push_all("abcb")
    assert band.drain() == "bbac"


@pytest.mark.parametrize(("weight", "order"), [(0.05, "ba"), (0.5, "ab"), (0.0, "ba")])
def test_a_shallow_session_that_waits_overtakes_a_deeper_one(weight: float, order: str) -> None:
    band = Queue(_turns(turn_priority_time_weight=weight).for_band(0))
    _take_turns(band, "b", 5)
    band.push("a")
    band.now = 11.0
    band.push("b")
    assert band.drain() == order


@pytest.mark.parametrize(
    ("limit", "idle", "order"), [(120.0, 119.0, "ba"), (120.0, 121.0, "ab"), (0.0, 1e3, "ba")]
)
def test_a_long_idle_session_begins_again(limit: float, idle: float, order: str) -> None:
    policy = _turns(turn_priority_inactivity_seconds=limit)
    band, other = Queue(policy.for_band(0)), Queue(policy.for_band(-1))
    _take_turns(band, "b", 2)
    band.now = other.now = idle
    band.push_all("ab")
    band.now += 500.0
    assert band.drain() == order


def test_requests_without_a_session_have_no_depth() -> None:
    band = Queue(_turns().for_band(0))
    _take_turns(band, DEFAULT_FAIRNESS_ID, 9)
    _take_turns(band, "a", 1)
    band.push(DEFAULT_FAIRNESS_ID)
    band.push("a")
    assert band.drain() == f"a{DEFAULT_FAIRNESS_ID}"


def test_a_remembered_session_retains_its_depth() -> None:
    policy = _turns(eviction_ttl_seconds=3600.0)
    band = Queue(policy.for_band(0))
    for at in (0.0, 1000.0, 4100.0):
        band.now = at
        for program in ("a", str(at)):
            band.push(program)
            band.complete(band.dispatch())
    assert {"a", "1000.0"} <= set(policy.program_shares())
    assert "0.0" not in policy.program_shares()


def test_the_shares_of_programs_are_reported() -> None:
    policy = _policy()
    assert isinstance(policy, SharesByProgram)
    band = Queue(policy.for_band(0))
    for waited in (1.0, 3.0):
        band.push("a")
        band.now += waited
        band.complete(band.dispatch(), Usage(10, 5))
    share = policy.program_shares()["a"]
    assert share.average_wait_seconds == 2.0
    assert share.attained_tokens == pytest.approx(20 + 20 * 0.5 ** (3.0 / HALF_LIFE))


def _best(
    since: Mapping[str, float],
    services: Mapping[str, float],
    now: float,
    weights: tuple[float, float],
) -> str:
    def norm(values: Mapping[str, float], one: str) -> float:
        least, greatest = min(values.values()), max(values.values())
        return 0.5 if least == greatest else (values[one] - least) / (greatest - least)

    served = {flow: services.get(flow, 0.0) for flow in since}
    waits = {flow: (now - at) * 1000 for flow, at in since.items()}
    scores = {
        flow: weights[0] * (1 - norm(served, flow)) + weights[1] * norm(waits, flow)
        for flow in since
    }
    best = max(scores.values())
    return min(flow for flow, score in scores.items() if score > best - 1e-9)


@examples(60)
@given(
    served=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 5000), st.integers(0, 40)), max_size=8
    ),
    waiting=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50), min_size=1),
    weights=st.sampled_from([(0.8, 0.2), (1.0, 0.0), (0.0, 1.0), (0.3, 0.7)]),
)
def test_selections_follow_the_formula(
    served: list[tuple[str, int, int]], waiting: dict[str, int], weights: tuple[float, float]
) -> None:
    """The formula is written out with service that halves, among the waiting flows only."""
    chosen = {"las_weight_service": weights[0], "las_weight_head_wait": weights[1]}
    band = Queue(_policy(**chosen).for_band(0))
    services: dict[str, float] = {}
    for program, tokens, seconds in served:
        band.now += seconds
        services = {one: left * 0.5 ** (seconds / HALF_LIFE) for one, left in services.items()}
        _serve(band, program, Usage(tokens, 0))
        services[program] = services.get(program, 0.0) + tokens
    start = band.now
    for program, delay in sorted(waiting.items(), key=lambda one: one[1]):
        band.now = start + delay
        band.push(program)
    since = {program: start + delay for program, delay in waiting.items()}
    found = band.fairness.select(band.now)
    expected = _best(since, services, band.now, weights)
    if found != expected:  # equal but for rounding
        tied = _best({one: since[one] for one in (found, expected)}, services, band.now, weights)
        assert tied in (found, expected)
        assert weights[0] == 0.0 or services.get(found, 0.0) == pytest.approx(
            services.get(expected, 0.0)
        )


def test_the_number_of_programs_is_limited() -> None:
    policy = _policy()
    band = policy.for_band(0)
    for number in (*range(MAX_PROGRAMS), 0, MAX_PROGRAMS, MAX_PROGRAMS + 1):
        body = ParsedBody(Api.RAW, "m")
        request = InferenceRequest("r", {}, body, "m", "m", fairness_id=f"p{number}")
        band.dispatched(QueuedRequest(request, number, 0.0), 0.0)
    shares = policy.program_shares()
    assert len(shares) == MAX_PROGRAMS
    assert "p0" in shares
    assert not {"p1", "p2"} & shares.keys()


PROGRAMS = """
featureGates: [flowControl]
plugins: [{type: program-aware-fairness}]
flowControl: {defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}}
"""


def test_the_service_of_programs_is_reported() -> None:
    house = routing(PROGRAMS)
    names = ("attained_service_tokens", "avg_wait_time_milliseconds", "jains_fairness_index")
    tokens, waits, index = (f"llm_d_epp_program_aware_{name}" for name in names)
    assert house.samples(tokens) == house.samples(waits) == house.samples(index) == {}
    settings = house.assembly.flow_control
    band = settings.default_band.fairness.for_band(0)
    for sequence, (program, used) in enumerate((("a", 300), ("b", 100))):
        house.metrics.labels.of("m", "m", program)
        request = InferenceRequest("r", {}, ParsedBody(Api.RAW), "m", "m", fairness_id=program)
        item = QueuedRequest(request, sequence, 1.0)
        band.dispatched(item, 1.5)
        band.completed(item, Usage(used), 2.0)
    assert house.samples(tokens) == {("a",): 300, ("b",): 100}
    assert house.samples(waits) == {("a",): 500, ("b",): 500}
    assert house.samples(index) == {(): 400**2 / (2 * (300**2 + 100**2))}
