"""utilization-detector: how full the pool is by its endpoints' queues and KV caches.

    saturation = mean over endpoints of max(q / queueDepthThreshold, kv / kvCacheUtilThreshold)
                 1.0 for an endpoint whose metrics are stale or were never read
                 1.0 without endpoints

`q` is the number of waiting requests as in queue-scorer. Metrics are stale when they are older than
`metricsStalenessThreshold` (200ms) beyond the interval at which their endpoint is asked.

As a filter it keeps the endpoints with fresh metrics and

    q < queueDepthThreshold · (1 + headroom)  and  kv < kvCacheUtilThreshold · (1 + headroom)

and all of them when there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.durations import parse_duration
from picker.framework.registry import Parameters, PluginType
from picker.scheduling.load_signals import waiting_requests, with_headroom
from picker.types import Candidate, InferenceRequest

FULL = 1.0


class UtilizationDetectorParameters(Parameters, frozen=True):
    """`parameters` of a utilization-detector."""

    queue_depth_threshold: int = 5
    kv_cache_util_threshold: float = 0.8
    metrics_staleness_threshold: str = "200ms"
    headroom: float = 0.0


class UtilizationDetector:
    """Judges by the last scrape. Stateless."""

    def __init__(self, parameters: UtilizationDetectorParameters) -> None:
        """Raises `ValueError` for thresholds out of range."""
        self._queue = parameters.queue_depth_threshold
        self._kv = parameters.kv_cache_util_threshold
        if self._queue < 1:
            raise ValueError(f"queueDepthThreshold must be positive, got {self._queue}")
        if not 0.0 < self._kv <= 1.0:
            raise ValueError(f"kvCacheUtilThreshold must be above 0 and at most 1, got {self._kv}")
        self._tolerated_seconds = parse_duration(parameters.metrics_staleness_threshold)
        if self._tolerated_seconds <= 0:
            raise ValueError("metricsStalenessThreshold must be positive")
        self._most_waiting = with_headroom(self._queue, parameters.headroom)
        self._most_used = with_headroom(self._kv, parameters.headroom)

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        """See the module's formula."""
        if not candidates:
            return FULL
        total = 0.0
        for candidate in candidates:
            seen = self._seen(candidate, now_seconds)
            total += FULL if seen is None else max(seen[0] / self._queue, seen[1] / self._kv)
        return total / len(candidates)

    def filter(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> Sequence[Candidate]:
        """The candidates with room, else all; metrics are judged as of the request's arrival."""
        kept: list[Candidate] = []
        for candidate in candidates:
            seen = self._seen(candidate, request.received_at_seconds)
            if seen is not None and seen[0] < self._most_waiting and seen[1] < self._most_used:
                kept.append(candidate)
        return kept or candidates

    def _seen(self, candidate: Candidate, now_seconds: float) -> tuple[int, float] | None:
        """Waiting requests and KV usage, None when they cannot be relied on."""
        metrics, waiting = candidate.metrics, waiting_requests(candidate)
        if metrics is None or waiting is None:
            return None
        age_seconds = now_seconds - metrics.updated_at_seconds
        if age_seconds > self._tolerated_seconds + metrics.interval_seconds:
            return None
        return waiting, metrics.kv_cache_usage


PLUGIN = PluginType(
    "utilization-detector",
    UtilizationDetectorParameters,
    lambda _name, parameters, _services: UtilizationDetector(parameters),
)
