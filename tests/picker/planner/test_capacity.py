"""Predictions compared with a queueing model of the workers, and their own invariants."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from picker.planner.capacity import (
    LatencyObjective,
    Load,
    Stage,
    WorkerCapacity,
    erlang_c,
    predict,
    replicas_for,
)
from tests.depth import examples
from tests.support.picker.queueing_fleet import Ask, QueueingFleet

WORKER = WorkerCapacity(
    prefill_tokens_per_second=8000, decode_base_seconds=0.020, decode_per_sequence_seconds=0.001
)
OBJECTIVE = LatencyObjective(ttft_seconds=2.0, itl_seconds=0.045)
PROMPT_DEVIATION, ANSWER_DEVIATION = 0.8, 0.9
LOAD = Load(
    1.0,
    2000,
    300,
    prompt_variation=math.expm1(PROMPT_DEVIATION**2),
    output_variation=math.expm1(ANSWER_DEVIATION**2),
)


def simulated(rate: float, replicas: int, num_requests: int) -> list[Ask]:
    rng, fleet, at = Random(1), QueueingFleet(WORKER, 0.0, replicas), 0.0
    asks = []
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        prompt = rng.lognormvariate(math.log(2000) - PROMPT_DEVIATION**2 / 2, PROMPT_DEVIATION)
        answer = rng.lognormvariate(math.log(300) - ANSWER_DEVIATION**2 / 2, ANSWER_DEVIATION)
        asks.append(Ask(at, int(prompt) + 1, int(answer) + 2))
    fleet.serve(asks, at + 600)
    return asks[num_requests // 10 :]


@pytest.mark.parametrize(
    ("replicas", "rate", "error"),
    [(1, 0.5, 0.03), (2, 1.2, 0.02), (4, 2.8, 0.015), (8, 6.4, 0.015), (8, 7.2, 0.035)],
)
def test_the_predicted_share_within_the_objective_matches_the_model(
    replicas: int, rate: float, error: float
) -> None:
    asks = simulated(rate, replicas, 6000)
    measured = sum(one.is_within(OBJECTIVE) for one in asks) / len(asks)
    found = predict(replace(LOAD, rate=rate), replicas, WORKER, OBJECTIVE, Stage.BOTH)
    assert found.within == pytest.approx(measured, abs=error)


def test_predicted_quantiles_match_the_model() -> None:
    asks = simulated(2.8, 4, 6000)
    first = sorted(one.first_at - one.at for one in asks)
    rest = sorted((one.ended_at - one.first_at) / (one.output - 1) for one in asks)
    objective = structs.replace(OBJECTIVE, share=0.95)
    found = predict(replace(LOAD, rate=2.8), 4, WORKER, objective, Stage.BOTH)
    at = len(asks) * 95 // 100
    assert found.ttft_seconds == pytest.approx(first[at], rel=0.2)
    assert found.itl_seconds == pytest.approx(rest[at], rel=0.1)


def test_latencies_under_overload_are_infinite() -> None:
    found = predict(replace(LOAD, rate=5.0), 1, WORKER, OBJECTIVE, Stage.PREFILL)
    assert (found.within, found.ttft_seconds, found.busy) == (0.0, math.inf, 1.0)
    assert predict(replace(LOAD, rate=2.0), 1, WORKER, OBJECTIVE, Stage.BOTH).within == 0.0


def test_each_stage_has_its_own_bound() -> None:
    load = replace(LOAD, rate=2.0)
    prefill = predict(load, 4, WORKER, OBJECTIVE, Stage.PREFILL)
    decode = predict(load, 4, WORKER, OBJECTIVE, Stage.DECODE)
    both = predict(load, 4, WORKER, OBJECTIVE, Stage.BOTH)
    assert prefill.itl_seconds == 0.0 < prefill.ttft_seconds < both.ttft_seconds
    assert decode.ttft_seconds == 0.0 < decode.itl_seconds < both.itl_seconds


@pytest.mark.parametrize("limit", [{"kv_tokens": 4_000}, {"max_sequences": 4}])
def test_sequences_beyond_the_limits_of_a_worker_miss_the_objective(limit: dict[str, int]) -> None:
    small = structs.replace(WORKER, **limit)
    load = replace(LOAD, rate=2.4)
    assert predict(load, 4, WORKER, OBJECTIVE, Stage.BOTH).within > 0.9
    assert predict(load, 4, small, OBJECTIVE, Stage.BOTH).within == 0.0
    assert replicas_for(load, small, OBJECTIVE, Stage.BOTH, 64)[0] > 4


def test_cached_prompts_need_fewer_replicas() -> None:
    load = replace(LOAD, rate=6.0)
    cached = replace(load, cached_tokens=1600)
    many, _ = replicas_for(load, WORKER, OBJECTIVE, Stage.BOTH, 64)
    few, _ = replicas_for(cached, WORKER, OBJECTIVE, Stage.BOTH, 64)
    assert few < many


@examples(50)
@given(rate=st.floats(0, 20), prompt=st.floats(1, 20_000), output=st.floats(1, 2_000))
def test_replicas_for_finds_the_minimum(rate: float, prompt: float, output: float) -> None:
    load = Load(rate, prompt, output)
    found, within = replicas_for(load, WORKER, OBJECTIVE, Stage.BOTH, 16)
    assert within >= OBJECTIVE.share or found == 16
    if found > 1:
        fewer = predict(load, found - 1, WORKER, OBJECTIVE, Stage.BOTH)
        assert fewer.within < OBJECTIVE.share


def test_erlang_c_matches_the_tables() -> None:
    """At 1 erlang a third of callers wait for two servers; for one, it is the utilization."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.4) == pytest.approx(0.4)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def test_a_share_near_one_has_a_finite_quantile() -> None:
    """The sums of the model are truncated."""
    objective = structs.replace(OBJECTIVE, share=1 - 1e-7)
    found = predict(replace(LOAD, rate=0.5), 4, WORKER, objective, Stage.BOTH)
    assert found.itl_seconds is not None
    assert found.itl_seconds > 0
