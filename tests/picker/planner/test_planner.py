"""Bounds, patience, bursts, idleness and thresholds: decisions on made-up intervals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picker.planner.capacity import LatencyObjective, Stage, WorkerCapacity
from picker.planner.planner import (
    GRACE_INTERVALS,
    Mode,
    Observation,
    Planner,
    RateForecast,
    Scaling,
    Sums,
)

WORKER = WorkerCapacity(
    prefill_tokens_per_second=8000, decode_base_seconds=0.020, decode_per_sequence_seconds=0.001
)
SLO = Scaling(
    Mode.SLO,
    Stage.BOTH,
    WORKER,
    LatencyObjective(ttft_seconds=2.0, itl_seconds=0.045),
    max_replicas=20,
    patience_intervals=3,
)
THRESHOLDS = Scaling(Mode.THRESHOLDS, Stage.BOTH, patience_intervals=1)


def minute(arrivals: int, replicas: int, waiting: int = 0) -> Observation:
    """A minute of requests with prompts of 2,000 tokens and answers of 300."""
    return Observation(
        seconds=60.0,
        arrivals=arrivals,
        replicas=replicas,
        ready=replicas,
        cached=Sums(arrivals),
        fresh=Sums(arrivals, 2000.0 * arrivals),
        output=Sums(arrivals, 300.0 * arrivals),
        waiting=waiting,
        mean_waiting=waiting,
        running=min(arrivals, 1),
    )


def test_more_requests_want_more_replicas_at_once() -> None:
    """A five-fold minute is more than chance, so its rate is the forecast from then on."""
    planner = Planner(SLO)
    for _ in range(5):
        steady = planner.next(minute(60, 2)).replicas
    assert planner.next(minute(300, steady)).replicas >= 4 * steady


def test_a_minute_that_chance_explains_changes_little() -> None:
    """Two standard deviations more than before move the forecast by a fraction of that."""
    forecast = RateForecast()
    for _ in range(20):
        forecast.add(100, 60.0)
    forecast.add(120, 60.0)
    assert 100 / 60 < forecast.at(2) < 106 / 60


def test_a_trend_is_followed_to_when_replicas_have_started() -> None:
    """A count that grows by one each minute is more in two minutes than it is now."""
    forecast = RateForecast()
    for number in range(60):
        forecast.add(100 + number, 60.0)
    assert 158 / 60 < forecast.at(2) < 165 / 60


def test_replicas_go_only_once_they_were_not_wanted_for_some_intervals() -> None:
    planner = Planner(SLO)
    for _ in range(4):
        busy = planner.next(minute(300, 5)).replicas
    held = [planner.next(minute(30, busy)).replicas for _ in range(3)]
    assert held[:2] == [busy, busy]
    assert held[2] < busy


def test_a_planner_that_has_just_begun_takes_nothing_away() -> None:
    """It has not seen what the replicas that are there were asked for."""
    planner = Planner(SLO)
    assert [planner.next(minute(30, 9)).replicas for _ in range(2)] == [9, 9]
    assert planner.next(minute(30, 9)).replicas < 9


def test_what_waits_is_to_be_served_too() -> None:
    calm, behind = Planner(SLO), Planner(SLO)
    assert behind.next(minute(60, 1, waiting=120)).replicas > calm.next(minute(60, 1)).replicas


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ({"max_replicas": 3}, 3),
        ({"min_replicas": 18}, 18),
        ({"max_step": 1}, 3),
        ({"max_step": 1, "min_replicas": 6}, 6),
    ],
)
def test_bounds_hold(bounds: dict[str, int], wanted: int) -> None:
    """Also at the first interval; those on the number go before that on the step."""
    planner = Planner(replace(SLO, **bounds))
    assert planner.next(minute(600, 2)).replicas == wanted


def test_too_few_replicas_are_said_to_be_too_few() -> None:
    plan = Planner(replace(SLO, max_replicas=1)).next(minute(600, 1))
    assert plan.reason.endswith("more than maxReplicas (1) would be needed")


def test_idle_workers_go_only_where_none_are_allowed() -> None:
    """After `patience_intervals` without a request; the first one wants a worker again."""
    planner = Planner(replace(SLO, min_replicas=0))
    planner.next(minute(5, 1))
    assert [planner.next(minute(0, 1)).replicas for _ in range(3)] == [1, 1, 0]
    assert planner.next(minute(1, 0)).replicas == 1
    kept = Planner(SLO)
    assert [kept.next(minute(0, 1)).replicas for _ in range(6)] == [1] * 6


def test_slow_workers_are_measured() -> None:
    """Steps that take twice as long as the capacity says want more replicas after a while."""
    planner, told = Planner(SLO), Planner(SLO)
    for _ in range(30):
        seen = replace(minute(300, 6), running=30.0)
        fast = told.next(seen).replicas
        slow = planner.next(replace(seen, itl_seconds=0.09)).replicas
    assert slow > fast


def test_without_a_capacity_only_thresholds_are_possible() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Planner(replace(SLO, worker=None))


@pytest.mark.parametrize(
    ("stage", "seen", "wanted"),
    [
        (Stage.BOTH, {"kv_usage": 0.95}, 4),
        (Stage.BOTH, {"kv_usage": 0.7}, 3),
        (Stage.BOTH, {"kv_usage": 0.3}, 2),
        (Stage.DECODE, {"kv_usage": 0.95, "mean_waiting": 0.0}, 4),
        (Stage.PREFILL, {"mean_waiting": 16.0}, 4),
        (Stage.PREFILL, {"mean_waiting": 9.0, "kv_usage": 0.95}, 3),
        (Stage.PREFILL, {"mean_waiting": 0.3}, 2),
        (Stage.BOTH, {"kv_usage": 0.95, "ready": 2}, 3),
    ],
)
def test_thresholds_change_by_one(stage: Stage, seen: dict[str, float], wanted: int) -> None:
    """Those of Dynamo, of three replicas; none while replicas start."""
    planner = Planner(replace(THRESHOLDS, stage=stage))
    assert planner.next(replace(minute(60, 3), **seen)).replicas == wanted


@pytest.mark.parametrize("scaling", [THRESHOLDS, replace(THRESHOLDS, stage=Stage.PREFILL), SLO])
def test_workers_whose_metrics_are_missing_are_not_removed(scaling: Scaling) -> None:
    """What they do is unknown: neither that they are idle nor that they have little to do."""
    planner = Planner(replace(scaling, min_replicas=0, patience_intervals=2))
    for _ in range(3):
        planner.next(minute(300, 6))
    unknown = Observation(60.0, 0, 6, 6, is_whole=False)
    if scaling.mode is Mode.SLO:
        assert [planner.next(unknown).replicas for _ in range(3)][-1] > 0
    else:
        assert [planner.next(unknown).replicas for _ in range(3)] == [6] * 3


def test_after_an_addition_none_is_removed_for_a_while() -> None:
    """New workers have an empty cache, which looks like too many of them."""
    planner = Planner(THRESHOLDS)
    planner.next(replace(minute(60, 3), kv_usage=0.95))
    calm = replace(minute(60, 4), kv_usage=0.1)
    wanted = [planner.next(calm).replicas for _ in range(GRACE_INTERVALS)]
    assert wanted == [4] * (GRACE_INTERVALS - 1) + [3]


def test_answers_count_from_the_first_that_ended() -> None:
    """The first interval ends before its answers do; their length is not mixed with nothing."""
    late, known = Planner(SLO), Planner(SLO)
    late.next(replace(minute(300, 6), output=Sums()))
    known.next(minute(300, 6))
    assert late.next(minute(300, 6)).reason == known.next(minute(300, 6)).reason
