"""utilization-detector: how full the pool is by its endpoints' queues and KV caches.

    saturation = mean over endpoints of max(q / queueDepthThreshold, kv / kvCacheUtilThreshold)
                 1.0 without endpoints

`q` is defined by queue-scorer; an endpoint whose page lacks one signal counts with the other.
Metrics are stale when they are older than `metricsStalenessThreshold` beyond the scrape interval of
their endpoint. An endpoint without fresh metrics, or with neither signal, counts with

    (own + others · ½^(age / 10 s)) / room

    own      this picker's requests in flight there
    others   requests beyond these in the last metrics
    room     the greatest number of requests ever seen running and, up to queueDepthThreshold,
             waiting, with no more of the KV cache in use than kvCacheUtilThreshold (of a greater
             usage, the corresponding part). It is at least `assumedConcurrency` until 20 scrapes
             have found the endpoint full, by one of the thresholds

so that a full endpoint becomes free when its requests end, an idle one takes its usual load, and
one that was never scraped takes a few. (The reference counts all of them as full, and so refuses
everything when scrapes fail.)

As a filter it passes the endpoints with fresh metrics and

    q < queueDepthThreshold · (1 + headroom)  and  kv < kvCacheUtilThreshold · (1 + headroom)

and all endpoints when none passes. A missing signal passes.
"""

from dataclasses import dataclass
from random import Random

from base.durations import parse_duration
from picker.framework.attributes import Attributes
from picker.framework.registry import (
    NonNegativeFloat,
    Parameters,
    PluginType,
    PositiveInt,
    PositiveShare,
)
from picker.plugins._shared.load_signals import waiting_requests, with_headroom
from picker.types import Candidate, Candidates, EndpointMetrics, InferenceRequest

FULL = 1.0
FADE_SECONDS = 10.0  # the requests of other pickers are in the last scrape only
SCRAPE_SECONDS = 0.3  # to the next scrape of a busy pool, and its own time
SCRAPES_TO_BELIEVE = 20  # a single scrape may find the queue of a burst


class UtilizationDetectorParameters(Parameters, frozen=True):
    queue_depth_threshold: PositiveInt = 5
    kv_cache_util_threshold: PositiveShare = 0.8
    metrics_staleness_threshold: str = "200ms"
    headroom: NonNegativeFloat = 0.0
    assumed_concurrency: PositiveInt = 64


@dataclass(slots=True)
class _Memory:
    """The numbers learned from one endpoint's metrics so far; `latest` are the last metrics."""

    latest: EndpointMetrics | None = None
    most: float = 0.0
    times_full: int = 0
    others: int = 0


class UtilizationDetector:
    """Compares scrapes with thresholds. Owns what is remembered of endpoints for failed scrapes."""

    def __init__(self, parameters: UtilizationDetectorParameters) -> None:
        self._queue = parameters.queue_depth_threshold
        self._kv = parameters.kv_cache_util_threshold
        self._assumed = parameters.assumed_concurrency
        self._memories: dict[str, _Memory] = {}
        self._tolerated_seconds = parse_duration(parameters.metrics_staleness_threshold)
        if self._tolerated_seconds <= 0:
            raise ValueError("metricsStalenessThreshold must be positive")
        self._max_waiting = with_headroom(self._queue, parameters.headroom)
        self._max_used = with_headroom(self._kv, parameters.headroom)
        self.settle_seconds = self._tolerated_seconds + SCRAPE_SECONDS

    def saturation(
        self, candidates: Candidates, attributes: Attributes, now_seconds: float
    ) -> float:
        if not candidates:
            return FULL
        total = 0.0
        for candidate in candidates:
            memory = self._memories.get(candidate.endpoint.key)
            # Identity, not equality: a new scrape with equal numbers counts as another one.
            if memory is None or memory.latest is not (candidate.metrics or candidate.last_metrics):
                memory = self._learned(candidate)
            seen = self._seen(candidate, now_seconds)
            if seen is None:
                total += self._estimate(candidate, memory, now_seconds)
            else:
                waiting, usage = seen
                total += max((waiting or 0) / self._queue, (usage or 0.0) / self._kv)
        return total / len(candidates)

    def stale(self, candidates: Candidates, now_seconds: float) -> int:
        return sum(self._seen(one, now_seconds) is None for one in candidates)

    def endpoint_removed(self, key: str) -> None:
        self._memories.pop(key, None)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """Return the endpoints within limits; staleness is judged at the request's arrival."""
        passed: list[Candidate] = []
        for candidate in candidates:
            seen = self._seen(candidate, request.received_at_seconds)
            if seen is None:
                continue
            waiting, usage = seen
            if (waiting or 0) < self._max_waiting and (usage or 0.0) < self._max_used:
                passed.append(candidate)
        return passed or candidates

    def _seen(
        self, candidate: Candidate, now_seconds: float
    ) -> tuple[int | None, float | None] | None:
        """Return waiting requests and KV usage; None for metrics that are stale or lack both."""
        metrics = candidate.metrics
        if metrics is None:
            return None
        age_seconds = now_seconds - metrics.updated_at_seconds
        if age_seconds > self._tolerated_seconds + metrics.interval_seconds:
            return None
        waiting, usage = waiting_requests(candidate), metrics.kv_cache_usage
        return None if waiting is None and usage is None else (waiting, usage)

    def _learned(self, candidate: Candidate) -> _Memory:
        memory = self._memories.setdefault(candidate.key, _Memory())
        metrics = candidate.metrics or candidate.last_metrics
        if metrics is None:
            return memory
        running, waiting = metrics.running_requests or 0, metrics.waiting_requests or 0
        usage = metrics.kv_cache_usage or 0.0
        taken: float = running + min(waiting, self._queue)
        # Above the threshold, only the part of the load that would fit below it counts as room.
        if usage >= self._kv:
            taken *= self._kv / usage
        memory.latest = metrics
        memory.most = max(memory.most, taken)
        memory.times_full += waiting >= self._queue or usage >= self._kv
        memory.others = max(0, running + waiting - candidate.inflight_requests)
        return memory

    def _estimate(self, candidate: Candidate, memory: _Memory, now_seconds: float) -> float:
        load: float = candidate.inflight_requests
        if memory.latest is not None and memory.others:
            age_seconds = max(0.0, now_seconds - memory.latest.updated_at_seconds)
            load += memory.others * 0.5 ** (age_seconds / FADE_SECONDS)
        is_known = memory.times_full >= SCRAPES_TO_BELIEVE
        return load / max(1.0, memory.most, 0.0 if is_known else self._assumed)


PLUGIN = PluginType("utilization-detector", UtilizationDetector)
