"""utilization-detector: queues and caches against thresholds, and estimates while scrapes fail."""

from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest

from picker.framework.attributes import Attributes
from picker.framework.flow import JudgesStaleness, SettlesLate
from picker.plugins.detectors.utilization_detector import (
    FADE_SECONDS,
    PLUGIN,
    SCRAPES_TO_BELIEVE,
    UtilizationDetector,
    UtilizationDetectorParameters,
)
from picker.types import Candidate, Endpoint, EndpointMetrics
from tests.support.picker.plugin_scenes import candidate, request_for

NOW = 50.0
STALE = NOW - 0.11
Seen = tuple[int | None, float | None, float]


def _fresh(waiting: int | None, usage: float | None) -> Seen:
    return waiting, usage, NOW - 0.09


def _candidates(seen: list[Seen | None]) -> list[Candidate]:
    return [
        candidate(known=False)
        if one is None
        else candidate(
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
        ([_fresh(10, 0.1)], 2.0),
        ([_fresh(1, 0.95)], 1.0556),
        ([_fresh(1, 0.1), _fresh(0, 0.2)], 0.2111),
        ([_fresh(1, 0.1), (0, 0.0, STALE)], 0.1),
        ([_fresh(1, 0.1), _fresh(15, 0.2)], 1.6),
        ([_fresh(5, 0.1)], 1.0),
        ([_fresh(0, 0.0)], 0.0),
        ([_fresh(10, None)], 2.0),
        ([_fresh(None, 0.45)], 0.5),
        ([_fresh(None, None), _fresh(5, 0.1)], 0.5),
    ],
)
def test_saturation_is_the_mean_of_the_worse_signal(
    detector: UtilizationDetector, seen: list[Seen | None], expected: float
) -> None:
    candidates = _candidates(seen)
    assert detector.saturation(candidates, Attributes(), NOW) == pytest.approx(expected, abs=1e-4)


def test_a_long_scrape_interval_makes_no_metrics_stale(detector: UtilizationDetector) -> None:
    idle = candidate(updated_at_seconds=NOW - 1.05, interval_seconds=1.0)
    late = candidate(updated_at_seconds=NOW - 1.2, interval_seconds=1.0)
    assert detector.stale([idle], NOW) == 0
    assert detector.stale([late], NOW) == 1


def test_own_requests_count_before_a_scrape_sees_them(detector: UtilizationDetector) -> None:
    burst = candidate(inflight=10, updated_at_seconds=NOW)
    assert detector.saturation([burst], Attributes(), NOW) == 2.0


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([_fresh(5, 0.8), _fresh(5, 0.9)], [0, 1]),
        ([_fresh(5, 0.8), _fresh(6, 0.1), _fresh(7, 0.1), _fresh(1, 0.97)], [0]),
        ([_fresh(0, 0.0), (0, 0.0, NOW - 0.21), None], [0]),
        ([(0, 0.0, NOW - 1), None], [0, 1]),
        ([_fresh(7, 0.1), _fresh(1, 0.97)], [0, 1]),
        ([_fresh(None, 0.1), _fresh(None, 0.97), _fresh(1, None), _fresh(7, None)], [0, 2]),
        ([_fresh(None, None), _fresh(1, 0.1)], [1]),
    ],
)
def test_the_filter_passes_fresh_endpoints_with_room(
    seen: list[Seen | None], expected: list[int]
) -> None:
    detector = UtilizationDetector(UtilizationDetectorParameters(headroom=0.2))
    candidates = _candidates(seen)
    request = request_for(received_at_seconds=NOW)
    passed = detector.filter(request, candidates, Attributes(), Random(0))
    assert list(passed) == [candidates[index] for index in expected]


def test_a_large_headroom_is_allowed() -> None:
    plugin = PLUGIN.make("d", UtilizationDetectorParameters(headroom=2.0))
    assert isinstance(plugin, JudgesStaleness)
    assert isinstance(plugin, SettlesLate)


class Blackout:
    def __init__(self, **parameters: Any) -> None:
        self.detector = UtilizationDetector(UtilizationDetectorParameters(**parameters))
        self.now = NOW
        self.last: EndpointMetrics | None = None

    def scraped(self, inflight: int, times: int = 1, **metrics: Any) -> None:
        for _ in range(times):
            self.now += 0.05
            self.last = EndpointMetrics(updated_at_seconds=self.now, **metrics)
            self.detector.saturation([self.candidate(inflight)], Attributes(), self.now)

    def candidate(self, inflight: int, is_marked: bool = False) -> Candidate:
        metrics = None if is_marked else self.last
        return Candidate(Endpoint("w", "10.0.0.1", 8000), metrics, inflight, self.last)

    def after(self, seconds: float, inflight: int, is_marked: bool = False) -> float:
        candidate = self.candidate(inflight, is_marked)
        return self.detector.saturation([candidate], Attributes(), self.now + seconds)


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_full_endpoint_is_free_again_when_its_requests_end(is_marked: bool) -> None:
    pool = Blackout()
    pool.scraped(45, times=30, running_requests=40, waiting_requests=5)
    assert pool.after(1.0, 45, is_marked) == 1.0
    assert pool.after(1.0, 40, is_marked) < 1.0
    assert pool.after(1.0, 0, is_marked) == 0.0


def test_an_idle_endpoint_takes_its_usual_load() -> None:
    pool = Blackout()
    pool.scraped(45, times=30, running_requests=40, waiting_requests=5)
    pool.scraped(0, times=10)
    assert pool.after(1.0, 44) < 1.0
    assert pool.after(1.0, 45) == 1.0


def test_a_full_cache_is_a_limit_as_well() -> None:
    pool = Blackout()
    pool.scraped(20, times=30, running_requests=20, kv_cache_usage=1.0)
    assert pool.after(1.0, 15) < 1.0
    assert pool.after(1.0, 16) == 1.0


def test_without_any_metrics_a_default_decides() -> None:
    pool = Blackout(assumed_concurrency=10)
    assert pool.after(0.0, 0) == 0.0
    assert pool.after(0.0, 5) == 0.5
    assert pool.after(0.0, 10) == 1.0
    assert pool.detector.stale([pool.candidate(0)], NOW) == 1


def test_a_single_queue_does_not_show_the_room_of_an_endpoint() -> None:
    """A worker at the beginning of a burst has few running and many waiting requests."""
    pool = Blackout()
    pool.scraped(30, times=SCRAPES_TO_BELIEVE - 1, running_requests=1, waiting_requests=29)
    assert pool.after(1.0, 30) < 0.5
    pool.scraped(30, running_requests=1, waiting_requests=29)
    assert pool.after(1.0, 30) > 1.0


def test_an_endpoint_that_was_never_full_may_take_more_than_the_default() -> None:
    pool = Blackout(assumed_concurrency=10)
    pool.scraped(50, running_requests=50)
    assert pool.after(1.0, 49) < 1.0


def test_the_requests_of_others_are_remembered_for_a_while() -> None:
    pool = Blackout()
    pool.scraped(10, times=30, running_requests=40, waiting_requests=5)
    assert pool.after(0.3, 10) == pytest.approx(1.0, abs=0.02)
    assert pool.after(FADE_SECONDS, 10) == pytest.approx((10 + 35 / 2) / 45)
    assert pool.after(20 * FADE_SECONDS, 0) == pytest.approx(0.0, abs=1e-3)


def test_a_removed_endpoint_is_forgotten() -> None:
    """Another server may take its place."""
    pool = Blackout(assumed_concurrency=10)
    pool.scraped(45, times=30, running_requests=40, waiting_requests=5)
    pool.last = None
    assert pool.after(1.0, 10) < 1.0
    pool.detector.endpoint_removed("default/w")
    assert pool.after(1.0, 10) == 1.0


SCRAPE_SECONDS = 0.05
REQUEST_SECONDS = 1.0


class Pool:
    """Endpoints that run `slots` requests each, for a second, while others wait; always more come.

    A request is let in while the detector says that the pool is not full, and goes where the least
    are under way.
    """

    def __init__(self, num_endpoints: int, slots: int) -> None:
        self.detector = UtilizationDetector(UtilizationDetectorParameters())
        self.slots = slots
        self.under_way = [0] * num_endpoints
        self.metrics: list[EndpointMetrics | None] = [None] * num_endpoints
        self.busy_until: list[list[float]] = [[0.0] * slots for _ in range(num_endpoints)]
        self.ends: list[tuple[float, int]] = []
        self.now = 0.0

    def run(self, seconds: float, *, scraped: bool, demand: bool = True) -> int:
        until, done = self.now + seconds, 0
        while self.now < until:
            self.now += SCRAPE_SECONDS
            while self.ends and self.ends[0][0] <= self.now:
                self.under_way[heappop(self.ends)[1]] -= 1
                done += 1
            if scraped:
                self.metrics = [self._metrics(count) for count in self.under_way]
            while demand and self._saturation() < 1.0:
                self._enter()
        return done

    def _metrics(self, count: int) -> EndpointMetrics:
        return EndpointMetrics(
            running_requests=min(count, self.slots),
            waiting_requests=max(0, count - self.slots),
            updated_at_seconds=self.now,
            interval_seconds=SCRAPE_SECONDS,
        )

    def _saturation(self) -> float:
        candidates = [
            Candidate(Endpoint(str(index), "10.0.0.1", 80), metrics, self.under_way[index], metrics)
            for index, metrics in enumerate(self.metrics)
        ]
        return self.detector.saturation(candidates, Attributes(), self.now)

    def _enter(self) -> None:
        index = min(range(len(self.under_way)), key=self.under_way.__getitem__)
        self.under_way[index] += 1
        begins = max(self.now, heappop(self.busy_until[index]))
        heappush(self.busy_until[index], begins + REQUEST_SECONDS)
        heappush(self.ends, (begins + REQUEST_SECONDS, index))


@pytest.mark.parametrize("slots", [4, 100])
@pytest.mark.parametrize("ends_idle", [False, True])
def test_a_pool_retains_its_throughput_without_metrics(slots: int, ends_idle: bool) -> None:
    pool = Pool(3, slots)
    normal = pool.run(10.0, scraped=True)
    longest = max(pool.under_way)
    if ends_idle:
        pool.run(10.0, scraped=True, demand=False)
        assert pool.under_way == [0, 0, 0]
    pool.run(2.0, scraped=False)
    assert pool.run(10.0, scraped=False) >= 0.95 * normal
    assert max(pool.under_way) <= longest + 1


@pytest.mark.parametrize("slots", [4, 32])
def test_a_pool_that_never_had_metrics_is_used(slots: int) -> None:
    assert Pool(3, slots).run(10.0, scraped=False) >= 0.95 * Pool(3, slots).run(10.0, scraped=True)
