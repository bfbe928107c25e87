"""Gauges of the pool, computed from a snapshot whenever somebody asks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.metrics import Collector, Metric, gauge_family
from picker.types import Candidate, EndpointMetrics


class PoolCollector(Collector):
    """Averages and deviations over the endpoints whose load is known, and counts of all."""

    def __init__(self, pool_name: str, datastore: Datastore, inflight: InflightLoad) -> None:
        self._pool = pool_name
        self._datastore = datastore
        self._inflight = inflight

    def collect(self) -> Iterator[Metric]:
        """One pass over a snapshot."""
        candidates = self._datastore.snapshot().candidates
        known = [candidate.metrics for candidate in candidates if candidate.metrics is not None]
        yield from self._aggregates(known)
        ready = gauge_family("ready_endpoints", "Endpoints in the pool.", ("name",))
        ready.add_metric([self._pool], len(candidates))
        yield ready
        yield from self._per_endpoint(candidates)

    def _aggregates(self, known: Sequence[EndpointMetrics]) -> Iterator[Metric]:
        readings = {
            "kv_cache_utilization": [metrics.kv_cache_usage for metrics in known],
            "queue_size": [float(metrics.waiting_requests) for metrics in known],
            "running_requests": [float(metrics.running_requests) for metrics in known],
        }
        for name, values in readings.items():
            average = gauge_family(f"average_{name}", f"Mean {name} of the pool.", ("name",))
            average.add_metric([self._pool], statistics.fmean(values) if values else 0.0)
            yield average
            deviation = gauge_family(
                f"std_dev_{name}", f"Sample standard deviation of {name} in the pool.", ("name",)
            )
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            deviation.add_metric([self._pool], spread)
            yield deviation

    def _per_endpoint(self, candidates: Sequence[Candidate]) -> Iterator[Metric]:
        queues = gauge_family(
            "per_endpoint_queue_size",
            "Requests waiting at an endpoint.",
            ("name", "model_server_endpoint"),
        )
        inflight = gauge_family(
            "inflight_requests",
            "Requests this picker has under way at an endpoint.",
            ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
        )
        for candidate in candidates:
            endpoint = candidate.endpoint
            if candidate.metrics is not None:
                queues.add_metric([self._pool, endpoint.name], candidate.metrics.waiting_requests)
            inflight.add_metric(
                [endpoint.name, endpoint.namespace, "", "", ""],
                self._inflight.requests(candidate.key),
            )
        yield queues
        yield inflight
