"""Every series the picker exposes, declared once.

`PickerMetrics` owns its own registry; the composition root makes one and hands it to who records.
Names, labels and buckets are those of the reference picker (prefix `llm_d_epp_`), so that its
dashboards and alerts work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "llm_d_epp_"
OWN_PREFIX = "pointsman_"  # what the reference has no name for
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_MODEL_NAMES = 1000
OVERFLOW = "other"

REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
FAST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PROCESSING_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
REQUEST_BYTES = tuple(64 * 2**k for k in range(25))
RATIOS = tuple(k / 10 for k in range(11))
HIT_BYTES = (0, *(16 * 2**k for k in range(13)))


class BoundedLabels:
    """Caps the number of distinct values a client can create of one kind of label."""

    def __init__(self, limit: int = MAX_MODEL_NAMES) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def admit(self, value: str) -> str:
        """`value`, or `other` when it is new and the cap is reached. "" is always allowed."""
        if not value or value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OVERFLOW
        self._seen.add(value)
        return value


class _Registry(CollectorRegistry):
    """Leaves out the `_created` twin of every series, which doubles the page and nobody reads."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class PickerMetrics:
    """Owns the registry and all series in it."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self._models = BoundedLabels()
        self._fairness = BoundedLabels()
        self._declare_requests()
        self._declare_decisions()
        self._declare_pool()

    def render(self) -> bytes:
        """The exposition, in `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def register(self, collector: Collector) -> None:
        """Add series that are computed when they are asked for."""
        self.registry.register(collector)

    def request_labels(
        self, model: str, target_model: str, fairness_id: str = "", priority: int = 0
    ) -> tuple[str, str, str, str]:
        """Values for `REQUEST_LABELS`, with what clients can invent capped."""
        return (
            self._models.admit(model),
            self._models.admit(target_model),
            self._fairness.admit(fairness_id),
            str(priority),
        )

    def _declare_requests(self) -> None:
        self.request_total = self._counter("request_total", "Requests routed.", REQUEST_LABELS)
        self.request_error_total = self._counter(
            "request_error_total",
            "Requests that ended in an error, by error code.",
            (*REQUEST_LABELS, "error_code"),
        )
        self.request_size_bytes = self._histogram(
            "request_size_bytes", "Body size of routed requests.", REQUEST_BYTES, REQUEST_LABELS
        )
        self.request_duration_seconds = self._histogram(
            "request_duration_seconds",
            "From the request's arrival to the end of its response.",
            SECONDS,
            REQUEST_LABELS,
        )
        self.request_running = self._gauge(
            "request_running", "Requests routed whose response has not ended.", REQUEST_LABELS
        )
        self.request_processing_duration_seconds = self._histogram(
            "request_processing_duration_seconds",
            "Time the picker itself adds to a request.",
            PROCESSING_SECONDS,
        )

        self.request_outcomes_total = Counter(
            OWN_PREFIX + "request_outcomes_total",
            "Requests by the one cause that ended them.",
            ("cause",),
            registry=self.registry,
        )
        self.plugin_failures_total = Counter(
            OWN_PREFIX + "plugin_failures_total",
            "Calls of data producers and hooks that failed by mistake.",
            ("plugin",),
            registry=self.registry,
        )

    def _declare_decisions(self) -> None:
        self.scheduler_e2e_duration_seconds = self._histogram(
            "scheduler_e2e_duration_seconds", "Duration of one scheduling decision.", FAST_SECONDS
        )
        self.scheduler_attempts_total = self._counter(
            "scheduler_attempts_total",
            "Scheduling decisions by outcome and first endpoint.",
            ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        )
        self.plugin_duration_seconds = self._histogram(
            "plugin_duration_seconds",
            "Duration of one call of a plugin.",
            FAST_SECONDS,
            ("extension_point", "plugin_type", "plugin_name"),
        )
        plugin = ("plugin_name", "plugin_type")
        self.prefix_indexer_size = self._gauge(
            "prefix_indexer_size", "Block hashes in the prefix index.", plugin
        )
        self.prefix_indexer_hit_ratio = self._histogram(
            "prefix_indexer_hit_ratio",
            "Share of a prompt's blocks that the best endpoint holds.",
            RATIOS,
            plugin,
        )
        self.prefix_indexer_hit_bytes = self._histogram(
            "prefix_indexer_hit_bytes",
            "Prompt bytes (four a token) that the best endpoint holds.",
            HIT_BYTES,
            plugin,
        )

    def _declare_pool(self) -> None:
        self.info = self._gauge("info", "Always 1; says what runs.", ("commit", "build_ref"))
        self.datalayer_poll_errors_total = self._counter(
            "datalayer_poll_errors_total", "Scrapes that failed.", ("source_type",)
        )
        self.datalayer_extract_errors_total = self._counter(
            "datalayer_extract_errors_total",
            "Scraped pages that lacked a series or had an unusable value.",
            ("source_type", "extractor_type"),
        )
        self.discovery_errors_total = Counter(
            OWN_PREFIX + "discovery_errors_total",
            "Endpoint entries that were skipped, and unreadable files.",
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(PREFIX + name, text, tuple(labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(PREFIX + name, text, tuple(labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(
            PREFIX + name, text, tuple(labels), buckets=tuple(buckets), registry=self.registry
        )


def gauge_family(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    """A gauge computed at collection time, under the common prefix."""
    return GaugeMetricFamily(PREFIX + name, text, labels=tuple(labels))


__all__ = ["CONTENT_TYPE", "BoundedLabels", "Collector", "Metric", "PickerMetrics", "gauge_family"]
