"""probabilistic-admitter: shedding grows with saturation."""

from random import Random
from typing import Any

import pytest

from picker.errors import RefusedError
from picker.framework.attributes import Attributes
from picker.plugins.admitters import ProbabilisticAdmitter
from tests.support.picker.plugin_scenes import candidate, request_for


def _admitter(**parameters: Any) -> ProbabilisticAdmitter:
    return ProbabilisticAdmitter(**parameters)


@pytest.mark.parametrize(
    ("parameters", "waiting", "usage", "expected"),
    [
        ({}, 0, 0.0, 0.0),
        ({}, 1, 0.0, 0.2**5 * 300),
        ({}, 0, 0.2, 0.25**5 * 300),
        ({}, 2, 0.1, 1.0),
        ({"power": 1.0, "k": 0.5}, 2, 0.6, 0.375),
        ({"queue_depth_threshold": 10.0, "power": 2.0, "k": 1.0}, 5, 0.1, 0.25),
        ({"k": 0.0}, 50, 1.0, 0.0),
        ({"power": 1000.0}, 10**6, 1.0, 1.0),
        ({"power": 1000.0, "k": 0.0}, 10**6, 1.0, 0.0),
    ],
)
def test_the_probability_follows_the_curve(
    parameters: dict[str, Any], waiting: int, usage: float, expected: float
) -> None:
    pool = [candidate(waiting_requests=waiting, kv_cache_usage=usage)]
    probability = _admitter(**parameters).refusal_probability(pool)
    assert probability == pytest.approx(expected)


def test_the_pool_is_as_full_as_its_mean() -> None:
    admitter = _admitter(power=1.0, k=1.0)
    assert admitter.refusal_probability([candidate(known=False), candidate()]) == 0.5
    assert admitter.refusal_probability([candidate(inflight=1), candidate()]) == 0.1


@pytest.mark.parametrize(
    ("waiting", "usage", "expected"), [(2, None, 0.4), (None, 0.4, 0.5), (None, None, 1.0)]
)
def test_a_missing_signal_does_not_count(
    waiting: int | None, usage: float | None, expected: float
) -> None:
    pool = [candidate(waiting_requests=waiting, kv_cache_usage=usage)]
    assert _admitter(power=1.0, k=1.0).refusal_probability(pool) == expected


def test_sheddable_requests_are_refused_by_chance() -> None:
    admitter = _admitter(power=1.0, k=0.5)
    pool = [candidate(waiting_requests=5)]
    rng = Random(7)
    refusals: list[RefusedError] = []
    for _ in range(400):
        admitter.admit(request_for(priority=0), pool, Attributes(), rng)
        try:
            admitter.admit(request_for(priority=-1), pool, Attributes(), rng)
        except RefusedError as refusal:
            refusals.append(refusal)
    assert 160 <= len(refusals) <= 240
    assert {refusal.status for refusal in refusals} == {429}


def test_an_idle_pool_sheds_nothing_and_a_full_one_everything() -> None:
    admitter = _admitter()
    sheddable = request_for(priority=-1)
    for seed in range(20):
        admitter.admit(sheddable, [candidate()], Attributes(), Random(seed))
        with pytest.raises(RefusedError):
            admitter.admit(sheddable, [candidate(known=False)], Attributes(), Random(seed))
