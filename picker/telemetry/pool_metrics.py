"""Gauges of the pool, computed from a snapshot on demand."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from base.series import Computed, Declaration, Labels, Twin
from picker.metrics.declarations import OWN_PREFIX, POOL_PREFIX, PREFIX
from picker.pool.datastore import Datastore
from picker.types import Candidate, EndpointMetrics


@dataclass(frozen=True, slots=True)
class PoolCollector:
    """Computes averages and deviations over the endpoints that report a signal, and counts all."""

    pool_name: str
    datastore: Datastore
    clock: Callable[[], float] = time.monotonic

    def collect(self) -> Iterator[Computed]:
        candidates = self.datastore.snapshot().candidates
        known = [candidate.metrics for candidate in candidates if candidate.metrics is not None]
        yield from self._aggregates(known)
        text = "Endpoints in the pool."
        yield self._of_pool("ready_endpoints", text, len(candidates), "ready_pods")
        answering = sum(map(self.datastore.is_answering, candidates))
        yield Computed(
            Declaration(
                OWN_PREFIX + "endpoints_unknown", "Endpoints that do not answer scrapes.", ("name",)
            ),
            lambda: (((self.pool_name,), len(candidates) - answering),),
        )
        yield from self._per_endpoint(candidates)

    def _of_pool(self, name: str, text: str, value: float, old_name: str = "") -> Computed:
        twins = (Twin(POOL_PREFIX + old_name, ("name",)),) if old_name else ()
        declaration = Declaration(PREFIX + name, text, ("name",), twins)
        return Computed(declaration, lambda: (((self.pool_name,), value),))

    def _aggregates(self, known: Sequence[EndpointMetrics]) -> Iterator[Computed]:
        readings: dict[str, Sequence[float | None]] = {
            "kv_cache_utilization": [metrics.kv_cache_usage for metrics in known],
            "queue_size": [metrics.waiting_requests for metrics in known],
            "running_requests": [metrics.running_requests for metrics in known],
        }
        for name, reported in readings.items():
            values = [value for value in reported if value is not None]
            average, deviation = f"average_{name}", _sample_deviation(values)
            yield self._of_pool(average, f"Mean {name} of the pool.", _mean(values), average)
            text = f"Sample standard deviation of {name} in the pool."
            yield self._of_pool(f"std_dev_{name}", text, deviation)

    def _per_endpoint(self, candidates: Sequence[Candidate]) -> Iterator[Computed]:
        def queues() -> Iterator[tuple[Labels, float]]:
            # Endpoints of different namespaces may share a name; a series may not appear twice.
            waiting: dict[str, int] = {}
            for one in candidates:
                if one.metrics is not None and one.metrics.waiting_requests is not None:
                    name = one.endpoint.name
                    waiting[name] = waiting.get(name, 0) + one.metrics.waiting_requests
            for name, requests in waiting.items():
                yield (name, self.pool_name), requests

        now = self.clock()

        def ages() -> Iterator[tuple[Labels, float]]:
            for one in candidates:
                endpoint, last = one.endpoint, one.last_metrics
                if last is not None:
                    age = max(0.0, now - last.updated_at_seconds)
                    yield (endpoint.name, self.pool_name, endpoint.namespace), age

        labels = ("model_server_endpoint", "name")
        twin = Twin(POOL_PREFIX + "per_pod_queue_size", labels, {labels[0]: "model_server_pod"})
        text = "Requests waiting at an endpoint."
        name = PREFIX + "per_endpoint_queue_size"
        yield Computed(Declaration(name, text, labels, (twin,)), queues)
        text = "Time since an endpoint's load was last known."
        name = OWN_PREFIX + "endpoint_metrics_age_seconds"
        yield Computed(Declaration(name, text, (*labels, "namespace")), ages)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _sample_deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
