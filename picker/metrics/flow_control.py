"""The series of flow control: who waits, how that ended, and how full the pool is."""

from __future__ import annotations

from collections.abc import Iterable

from picker.metrics.buckets import FAST_SECONDS
from picker.metrics.declarations import EXTENSION_PREFIX, Declarations, extension
from picker.metrics.series import AnySeries, Gauge, Histogram, Twin

POOL = ("inference_pool",)
BAND = ("priority", *POOL)
MODELS = ("model_name", "target_model_name")
WAITING = ("fairness_id", *BAND, *MODELS)
QUEUE_SECONDS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
CONFIRMATION_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_NAME = "flow_control_"


class FlowSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self._declare_requests()
        self._declare_pool()
        self._declare_reclaim()

    def _declare_requests(self) -> None:
        self.request_queue_duration_seconds = self._times(
            "request_queue_duration_seconds",
            "Time that a request waited, by how that ended.",
            QUEUE_SECONDS,
            ("fairness_id", "priority", "outcome", *POOL, *MODELS),
        )
        self.dispatch_cycle_duration_seconds = self._times(
            "dispatch_cycle_duration_seconds", "Duration of one look at the queues.", FAST_SECONDS
        )
        self.request_enqueue_duration_seconds = self._times(
            "request_enqueue_duration_seconds",
            "Time that it took to put a request in its queue, or to answer it without that.",
            FAST_SECONDS,
            ("fairness_id", "priority", "outcome"),
        )
        self.queue_size = self._waiting("queue_size", "Requests that wait.")
        self.queue_bytes = self._waiting("queue_bytes", "Bytes of the requests that wait.")
        self.requests_total = self._counter(
            _NAME + "requests_total",
            "Requests by how their time at the gate ended.",
            ("outcome", *BAND),
        )

    def _declare_pool(self) -> None:
        self.pool_saturation = self._gauge(
            _NAME + "pool_saturation",
            "How full the pool is; 1 is full.",
            (*POOL, "stage"),
            extension(_NAME + "pool_saturation", (*POOL, "stage")),
        )
        self.stale_endpoints = self._gauge(
            _NAME + "stale_endpoints", "Endpoints judged without fresh metrics.", ("detector",)
        )
        self.capacity_utilization_requests = self._share(
            "capacity_utilization_requests", "Share of a band's requests that is taken.", BAND
        )
        self.capacity_utilization_bytes = self._share(
            "capacity_utilization_bytes", "Share of a band's bytes that is taken.", BAND
        )
        self.global_capacity_utilization_requests = self._share(
            "global_capacity_utilization_requests", "Share of all requests that is taken.", POOL
        )
        self.global_capacity_utilization_bytes = self._share(
            "global_capacity_utilization_bytes", "Share of all bytes that is taken.", POOL
        )

    def _declare_reclaim(self) -> None:
        self.revocations_issued_total = self._counter(
            _NAME + "revocations_issued_total",
            "Requests under way that were stopped in favour of a priority.",
            BAND,
        )
        self.revocations_total = self._counter(
            _NAME + "revocations_total",
            "Those that were then over, and those that took too long.",
            ("outcome", *POOL),
        )
        self.reclaim_target = self._gauge(
            _NAME + "reclaim_target", "Saturation that the last of them were to free.", POOL
        )
        self.pending_reclaim = self._gauge(
            _NAME + "pending_reclaim", "Saturation that is still to be freed.", POOL
        )
        self.revocation_confirmation_seconds = self._histogram(
            _NAME + "revocation_confirmation_seconds",
            "From a request's being stopped to its end.",
            CONFIRMATION_SECONDS,
            POOL,
        )

    def _times(
        self, name: str, text: str, buckets: Iterable[float], labels: tuple[str, ...] = ()
    ) -> Histogram:
        twins = (Twin(EXTENSION_PREFIX + _NAME + name, labels),)
        return self._histogram(_NAME + name, text, buckets, labels, twins)

    def _waiting(self, name: str, text: str) -> Gauge:
        return self._gauge(_NAME + name, text, WAITING, extension(_NAME + name, WAITING))

    def _share(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        return self._gauge(_NAME + name, text, labels)
