"""Bounds, patience, bursts, idleness and thresholds: decisions on synthetic intervals."""

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


def test_a_burst_raises_the_replicas_at_once() -> None:
    """Chance does not explain a five-fold minute, so its rate is the forecast from then on."""
    planner = Planner(SLO)
    for _ in range(5):
        steady = planner.next(minute(60, 2)).replicas
    assert planner.next(minute(300, steady)).replicas >= 4 * steady


def test_a_minute_that_chance_explains_changes_little() -> None:
    """Two standard deviations move the forecast by a fraction of that."""
    forecast = RateForecast()
    for _ in range(20):
        forecast.add(100, 60.0)
    forecast.add(120, 60.0)
    assert 100 / 60 < forecast.at(2) < 106 / 60


def test_a_trend_is_extrapolated_to_the_start_of_new_replicas() -> None:
    forecast = RateForecast()
    for number in range(60):
        forecast.add(100 + number, 60.0)
    assert 158 / 60 < forecast.at(2) < 165 / 60


def test_replicas_are_removed_only_after_some_intervals_without_need() -> None:
    planner = Planner(SLO)
    for _ in range(4):
        busy = planner.next(minute(300, 5)).replicas
    held = [planner.next(minute(30, busy)).replicas for _ in range(3)]
    assert held[:2] == [busy, busy]
    assert held[2] < busy


def test_a_new_planner_removes_no_replicas() -> None:
    """It does not know why they were requested."""
    planner = Planner(SLO)
    assert [planner.next(minute(30, 9)).replicas for _ in range(2)] == [9, 9]
    assert planner.next(minute(30, 9)).replicas < 9


def test_waiting_requests_count_as_load() -> None:
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
    planner = Planner(replace(SLO, **bounds))
    assert planner.next(minute(600, 2)).replicas == wanted


def test_a_plan_reports_that_the_limit_is_too_low() -> None:
    plan = Planner(replace(SLO, max_replicas=1)).next(minute(600, 1))
    assert plan.reason.endswith("more than maxReplicas (1) would be needed")


def test_idle_workers_are_removed_only_if_the_minimum_is_zero() -> None:
    planner = Planner(replace(SLO, min_replicas=0))
    planner.next(minute(5, 1))
    assert [planner.next(minute(0, 1)).replicas for _ in range(3)] == [1, 1, 0]
    assert planner.next(minute(1, 0)).replicas == 1
    before = Planner(SLO)
    assert [before.next(minute(0, 1)).replicas for _ in range(6)] == [1] * 6


def test_measured_slowness_raises_the_replicas() -> None:
    planner, measured = Planner(SLO), Planner(SLO)
    for _ in range(30):
        seen = replace(minute(300, 6), running=30.0)
        fast = measured.next(seen).replicas
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
def test_thresholds_change_the_replicas_by_one(
    stage: Stage, seen: dict[str, float], wanted: int
) -> None:
    planner = Planner(replace(THRESHOLDS, stage=stage))
    assert planner.next(replace(minute(60, 3), **seen)).replicas == wanted


@pytest.mark.parametrize("scaling", [THRESHOLDS, replace(THRESHOLDS, stage=Stage.PREFILL), SLO])
def test_workers_without_metrics_are_not_removed(scaling: Scaling) -> None:
    planner = Planner(replace(scaling, min_replicas=0, patience_intervals=2))
    for _ in range(3):
        planner.next(minute(300, 6))
    unknown = Observation(60.0, 0, 6, 6, is_whole=False)
    if scaling.mode is Mode.SLO:
        assert [planner.next(unknown).replicas for _ in range(3)][-1] > 0
    else:
        assert [planner.next(unknown).replicas for _ in range(3)] == [6] * 3


def test_after_an_addition_no_replica_is_removed_for_a_while() -> None:
    """A new worker has an empty cache, which looks like too many workers."""
    planner = Planner(THRESHOLDS)
    planner.next(replace(minute(60, 3), kv_usage=0.95))
    calm = replace(minute(60, 4), kv_usage=0.1)
    wanted = [planner.next(calm).replicas for _ in range(GRACE_INTERVALS)]
    assert wanted == [4] * (GRACE_INTERVALS - 1) + [3]


def test_the_first_finished_answers_set_the_output_length() -> None:
    late, known = Planner(SLO), Planner(SLO)
    late.next(replace(minute(300, 6), output=Sums()))
    known.next(minute(300, 6))
    assert late.next(minute(300, 6)).reason == known.next(minute(300, 6)).reason
