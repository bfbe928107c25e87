"""The throughput of a pool behind the utilization-detector when all scrapes fail."""

from heapq import heappop, heappush

import pytest

from picker.framework.attributes import Attributes
from picker.plugins.detectors.utilization_detector import (
    UtilizationDetector,
    UtilizationDetectorParameters,
)
from picker.types import Candidate, Endpoint, EndpointMetrics

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
