"""Gauges of the pool, computed from a snapshot whenever somebody asks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily

from picker.metrics.declarations import OWN_PREFIX, PREFIX
from picker.metrics.picker_metrics import Collector, Metric, gauge_family, gauge_of_rows
from picker.pool.datastore import Datastore
from picker.types import Candidate, EndpointMetrics


class PoolCollector(Collector):
    """Averages and deviations over the endpoints that report a signal, and counts of all.

    `clock` is the one that scrapes are timed with, in seconds.
    """

    def __init__(
        self,
        pool_name: str,
        datastore: Datastore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool_name
        self._datastore = datastore
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """One pass over a snapshot."""
        candidates = self._datastore.snapshot().candidates
        known = [candidate.metrics for candidate in candidates if candidate.metrics is not None]
        yield from self._aggregates(known)
        ready = gauge_family("ready_endpoints", "Endpoints in the pool.", ("name",))
        ready.add_metric([self._pool], len(candidates))
        yield ready
        unknown = GaugeMetricFamily(
            OWN_PREFIX + "endpoints_unknown",
            "Endpoints that do not answer scrapes.",
            labels=("name",),
        )
        answering = sum(map(self._datastore.is_answering, candidates))
        unknown.add_metric([self._pool], len(candidates) - answering)
        yield unknown
        yield from self._per_endpoint(candidates)

    def _aggregates(self, known: Sequence[EndpointMetrics]) -> Iterator[Metric]:
        readings: dict[str, Sequence[float | None]] = {
            "kv_cache_utilization": [metrics.kv_cache_usage for metrics in known],
            "queue_size": [metrics.waiting_requests for metrics in known],
            "running_requests": [metrics.running_requests for metrics in known],
        }
        for name, reported in readings.items():
            values = [value for value in reported if value is not None]
            average = gauge_family(f"average_{name}", f"Mean {name} of the pool.", ("name",))
            average.add_metric([self._pool], _mean(values))
            yield average
            deviation = gauge_family(
                f"std_dev_{name}", f"Sample standard deviation of {name} in the pool.", ("name",)
            )
            deviation.add_metric([self._pool], _sample_deviation(values))
            yield deviation

    def _per_endpoint(self, candidates: Sequence[Candidate]) -> Iterator[Metric]:
        def queues() -> Iterator[tuple[tuple[str, ...], float]]:
            # Endpoints of different namespaces may share a name; a series may not appear twice.
            waiting: dict[str, int] = {}
            for one in candidates:
                if one.metrics is not None and one.metrics.waiting_requests is not None:
                    name = one.endpoint.name
                    waiting[name] = waiting.get(name, 0) + one.metrics.waiting_requests
            for name, requests in waiting.items():
                yield (self._pool, name), requests

        now = self._clock()

        def ages() -> Iterator[tuple[tuple[str, ...], float]]:
            for one in candidates:
                endpoint, last = one.endpoint, one.last_metrics
                if last is not None:
                    age = max(0.0, now - last.updated_at_seconds)
                    yield (self._pool, endpoint.namespace, endpoint.name), age

        yield gauge_of_rows(
            PREFIX + "per_endpoint_queue_size",
            "Requests waiting at an endpoint.",
            ("name", "model_server_endpoint"),
            queues,
        )
        yield gauge_of_rows(
            OWN_PREFIX + "endpoint_metrics_age_seconds",
            "Time since an endpoint's load was last known.",
            ("name", "namespace", "model_server_endpoint"),
            ages,
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _sample_deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
