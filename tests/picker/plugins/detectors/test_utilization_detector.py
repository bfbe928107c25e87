"""utilization-detector: queues and caches against thresholds, and stale is full."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Filter, SaturationDetector
from picker.plugins.detectors.utilization_detector import (
    PLUGIN,
    UtilizationDetector,
    UtilizationDetectorParameters,
)
from picker.types import Candidate, InferenceRequest

NOW = 50.0
STALE = NOW - 0.11
Seen = tuple[int, float, float]


def _fresh(waiting: int, usage: float) -> Seen:
    return waiting, usage, NOW - 0.09


def _candidates(make: Callable[..., Candidate], seen: list[Seen | None]) -> list[Candidate]:
    return [
        make(known=False)
        if one is None
        else make(
            str(index), waiting_requests=one[0], kv_cache_usage=one[1], updated_at_seconds=one[2]
        )
        for index, one in enumerate(seen)
    ]


@pytest.fixture
def detector() -> UtilizationDetector:
    parameters = UtilizationDetectorParameters(
        kv_cache_util_threshold=0.9, metrics_staleness_threshold="100ms"
    )
    return UtilizationDetector(parameters)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([], 1.0),
        ([_fresh(2, 0.5)], 0.5556),
        ([(0, 0.0, STALE)], 1.0),
        ([_fresh(10, 0.1)], 2.0),
        ([_fresh(1, 0.95)], 1.0556),
        ([None], 1.0),
        ([_fresh(1, 0.1), _fresh(0, 0.2)], 0.2111),
        ([_fresh(1, 0.1), (0, 0.0, STALE)], 0.6),
        ([_fresh(1, 0.1), _fresh(15, 0.2)], 1.6),
        ([_fresh(5, 0.1)], 1.0),
        ([_fresh(0, 0.0)], 0.0),
    ],
)
def test_saturation_is_the_mean_of_the_worse_signal(
    detector: UtilizationDetector,
    candidate: Callable[..., Candidate],
    seen: list[Seen | None],
    expected: float,
) -> None:
    """Endpoints with stale or no metrics count as full; no endpoints are full."""
    candidates = _candidates(candidate, seen)
    assert detector.saturation(candidates, Attributes(), NOW) == pytest.approx(expected, abs=1e-4)


def test_an_endpoint_that_is_asked_less_often_is_not_stale(
    detector: UtilizationDetector, candidate: Callable[..., Candidate]
) -> None:
    """An idle pool is not full because nobody asks it every 50 ms."""
    idle = candidate(updated_at_seconds=NOW - 1.05, interval_seconds=1.0)
    late = candidate(updated_at_seconds=NOW - 1.2, interval_seconds=1.0)
    assert detector.saturation([idle], Attributes(), NOW) == 0.0
    assert detector.saturation([late], Attributes(), NOW) == 1.0


def test_own_requests_count_before_a_scrape_sees_them(
    detector: UtilizationDetector, candidate: Callable[..., Candidate]
) -> None:
    """A burst fills the pool at once."""
    burst = candidate(inflight=10, updated_at_seconds=NOW)
    assert detector.saturation([burst], Attributes(), NOW) == 2.0


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        ([_fresh(5, 0.8), _fresh(5, 0.9)], [0, 1]),
        ([_fresh(5, 0.8), _fresh(6, 0.1), _fresh(7, 0.1), _fresh(1, 0.97)], [0]),
        ([_fresh(0, 0.0), (0, 0.0, NOW - 0.21), None], [0]),
        ([(0, 0.0, NOW - 1), None], [0, 1]),
        ([_fresh(7, 0.1), _fresh(1, 0.97)], [0, 1]),
    ],
)
def test_the_filter_keeps_fresh_endpoints_with_room(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    seen: list[Seen | None],
    kept: list[int],
) -> None:
    """Below the thresholds with their headroom; everybody when there is no such endpoint."""
    detector = UtilizationDetector(UtilizationDetectorParameters(headroom=0.2))
    candidates = _candidates(candidate, seen)
    request = request_for(received_at_seconds=NOW)
    passed = detector.filter(request, candidates, Attributes(), Random(0))
    assert list(passed) == [candidates[index] for index in kept]


@pytest.mark.parametrize(
    "parameters",
    [
        {"queue_depth_threshold": 0},
        {"kv_cache_util_threshold": 1.5},
        {"kv_cache_util_threshold": 0.0},
        {"metrics_staleness_threshold": "0s"},
        {"metrics_staleness_threshold": "soon"},
        {"headroom": -0.5},
        {"headroom": float("nan")},
        {"headroom": 1e308},
        {"queue_depth_threshold": 10**400, "headroom": 0.5},
    ],
)
def test_thresholds_out_of_range_are_refused(parameters: dict[str, Any]) -> None:
    """When the picker starts."""
    with pytest.raises(ValueError, match=r"Threshold|headroom|duration"):
        UtilizationDetector(UtilizationDetectorParameters(**parameters))


def test_a_great_headroom_is_fine() -> None:
    """It is detector and filter in one plugin."""
    plugin = PLUGIN.make("d", UtilizationDetectorParameters(headroom=2.0))
    assert isinstance(plugin, SaturationDetector)
    assert isinstance(plugin, Filter)
