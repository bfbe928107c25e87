"""The load of a pool is that of its fullest stage, requests on their way included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.flowcontrol.saturation import NOTHING_LET_IN, LetIn, pool_load, spread
from picker.framework.attributes import EndpointLoad
from picker.framework.disaggregation import ROLE_LABEL
from picker.types import Candidate, EndpointMetrics
from tests.depth import examples
from tests.support.picker.flow_scene import Slots, endpoint


def pool(*roles: tuple[str | None, int]) -> list[Candidate]:
    return [
        Candidate(endpoint(i, {} if role is None else {ROLE_LABEL: role}), None, load)
        for i, (role, load) in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("candidates", "effective", "stages"),
    [
        (pool((None, 1), (None, 2)), 1.5, {"decode": 1.5}),
        (pool(("prefill", 3), ("decode", 1)), 3.0, {"prefill": 3.0, "decode": 1.0}),
        (pool(("encode-prefill", 1), (None, 2)), 2.0, {"prefill": 1.0, "decode": 2.0}),
        (pool(("both", 4), ("prefill", 0)), 4.0, {"prefill": 2.0, "decode": 4.0}),
        (pool(("encode-prefill-decode", 2)), 2.0, {"prefill": 2.0, "decode": 2.0}),
        (pool(("prefill-decode", 1), ("encode", 9)), 1.0, {"prefill": 1.0, "decode": 1.0}),
        (pool(("encode", 2), ("strange", 4)), 3.0, {}),
        ([], 1.0, {}),
    ],
)
def test_the_load_of_a_stage_is_that_of_its_endpoints(
    candidates: list[Candidate], effective: float, stages: dict[str, float]
) -> None:
    load = pool_load(Slots(1), candidates, NOTHING_LET_IN, 0.0)
    assert (load.effective, dict(load.stages)) == (effective, stages)
    assert load.num_endpoints == len(candidates)


def test_requests_on_their_way_count_in_every_stage() -> None:
    candidates = pool(("prefill", 0), ("decode", 0), ("decode", 0))
    load = pool_load(Slots(1), candidates, LetIn(2, 0), 0.0)
    assert load.stages == {"prefill": 2.0, "decode": 1.0}


@examples(200)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=8), st.integers(0, 40))
def test_admitted_requests_spread_as_if_placed_one_by_one(loads: list[int], count: int) -> None:
    candidates = pool(*((None, load) for load in loads))
    one_by_one = list(loads)
    for _ in range(count):
        one_by_one[one_by_one.index(min(one_by_one))] += 1
    loaded, added = spread(candidates, LetIn(count, 10 * count))
    assert sorted(one.inflight_requests for one in loaded) == sorted(one_by_one)
    assert [one.endpoint for one in loaded] == [one.endpoint for one in candidates]
    gains = {
        one.key: one.inflight_requests - before
        for one, before in zip(loaded, loads, strict=True)
        if one.inflight_requests != before
    }
    assert added == {key: EndpointLoad(gain, 10 * gain) for key, gain in gains.items()}


def test_admitted_requests_avoid_an_endpoint_that_reports_load() -> None:
    busy = Candidate(endpoint(0), EndpointMetrics(waiting_requests=5, running_requests=2), 0)
    idle = Candidate(endpoint(1), EndpointMetrics(), 3)
    loaded, _ = spread([busy, idle], LetIn(4, 0))
    assert [one.inflight_requests for one in loaded] == [0, 7]
