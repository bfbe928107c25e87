"""Every series the picker exposes, declared once.

`PickerMetrics` owns all of them; the composition root makes one and hands it to those that record.
Names, labels and buckets are those of the reference picker (prefix `llm_d_epp_`), so that its
dashboards and alerts work unchanged, and so are the deprecated names that it still exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from picker.metrics.declarations import (
    EXTENSION_PREFIX,
    FAST_SECONDS,
    HIT_BYTES,
    INPUT_TOKENS,
    ITL_SECONDS,
    MODEL_LABELS,
    NTPOT_SECONDS,
    OUTPUT_TOKENS,
    POOL_PREFIX,
    PREFIX,
    PROCESSING_SECONDS,
    RATIOS,
    REQUEST_BYTES,
    REQUEST_LABELS,
    RESPONSE_BYTES,
    RESPONSE_PROCESSING_SECONDS,
    SCHEDULER_PREFIX,
    SECONDS,
    TPOT_SECONDS,
    TTFT_SECONDS,
    Declarations,
    extension,
    objective,
)
from picker.metrics.families import (
    FlowSeries,
    HealthSeries,
    KubernetesSeries,
    KvSeries,
    PeerSeries,
    PluginSeries,
    RecordingSeries,
    StreamSeries,
    XdsSeries,
)
from picker.metrics.label_caps import BoundedLabels, RequestLabels
from picker.metrics.series import AnySeries, Twin, metrics_of, text_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PLUGIN_LABELS = ("extension_point", "plugin_type", "plugin_name")
ENDPOINT_RENAMED = {"endpoint_name": "pod_name"}
# Series that other collectors make: the deprecated name, and what it calls a label.
POOL_TWINS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    PREFIX + "average_kv_cache_utilization": ("average_kv_cache_utilization", {}),
    PREFIX + "average_queue_size": ("average_queue_size", {}),
    PREFIX + "average_running_requests": ("average_running_requests", {}),
    PREFIX + "ready_endpoints": ("ready_pods", {}),
    PREFIX + "per_endpoint_queue_size": (
        "per_pod_queue_size",
        {"model_server_endpoint": "model_server_pod"},
    ),
}


class _Declared(Collector):
    """Shows declared series to a registry of the library."""

    def __init__(self, series: list[AnySeries]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for one in self._series:
            yield from metrics_of(one)


class _WithTwins(Collector):
    """Another collector's series, with the deprecated names of those that had any."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            yield metric
            twin = POOL_TWINS.get(metric.name)
            if twin is not None:
                yield _renamed(metric, POOL_PREFIX + twin[0], twin[1])


class PickerMetrics(Declarations):
    """Owns all series; those of single plugin types are in `plugins`.

    `registry` shows them to the library that other collectors are made with.
    """

    def __init__(self) -> None:
        declared: list[AnySeries] = []
        super().__init__(declared)
        self._labels = RequestLabels()
        self._collectors = CollectorRegistry()
        self.registry = CollectorRegistry()
        self._declare_requests()
        self._declare_responses()
        self._declare_response_times()
        self._declare_decisions()
        self._declare_pool()
        self._declare_config()
        self.plugins = PluginSeries(declared)
        self.streams = StreamSeries(declared)
        self.health = HealthSeries(declared)
        self.kv = KvSeries(declared)
        self.recording = RecordingSeries(declared)
        self.flow = FlowSeries(declared)
        self.peers = PeerSeries(declared)
        self.kubernetes = KubernetesSeries(declared)
        self.xds = XdsSeries(declared)
        self.registry.register(_Declared(self._series))

    @property
    def series(self) -> Sequence[AnySeries]:
        """All that are declared here, in the order of the exposition."""
        return self._series

    @property
    def of_process(self) -> Sequence[AnySeries]:
        """The series of the process, as opposed to those of one of its pools."""
        xds, election = self.xds, self.kubernetes.election
        return (
            self.info,
            self.unknown_pool_total,
            self.admin_failures_total,
            *(self.streams.inflight, self.streams.duration_seconds, self.streams.total),
            *(xds.clients, xds.responses_total, xds.acks_total, xds.nacks_total),
            *election.all,
        )

    def render(self, series: Iterable[AnySeries] | None = None) -> bytes:
        """The exposition, in `CONTENT_TYPE`; of declared series only these, where given."""
        chosen = self._series if series is None else series
        lines = [line for one in chosen for line in text_of(one)]
        return "".join(lines).encode() + generate_latest(self._collectors)

    def register(self, collector: Collector) -> None:
        """Add series that are computed when they are asked for."""
        with_twins = _WithTwins(collector)
        self.registry.register(with_twins)
        self._collectors.register(with_twins)

    def pin_models(self, names: Iterable[str]) -> None:
        """Names of models that are configured, which keep their label however many names clients
        invent.
        """
        self._labels.pin_models(names)

    def model_label(self, model: str) -> str:
        """A model's name as a label, capped."""
        return self._labels.models.admit(model)

    def fairness_label(self, fairness_id: str) -> str:
        """Whose requests they are as a label, capped."""
        return self._labels.fairness_ids.admit(fairness_id)

    def request_labels(
        self, model: str, target_model: str, fairness_id: str = "", priority: int = 0
    ) -> tuple[str, str, str, str]:
        """Values for `REQUEST_LABELS`, with what clients can invent capped."""
        return self._labels.of(model, target_model, fairness_id, priority)

    def _declare_requests(self) -> None:
        self.request_total = self._counter(
            "request_total",
            "Requests routed.",
            REQUEST_LABELS,
            objective("request_total", (*MODEL_LABELS, "priority")),
        )
        self.request_error_total = self._counter(
            "request_error_total",
            "Requests that ended in an error, by error code.",
            (*REQUEST_LABELS, "error_code"),
            objective("request_error_total", (*MODEL_LABELS, "error_code")),
        )
        self.request_size_bytes = self._of_requests(
            "request_size_bytes", "Body size of routed requests.", REQUEST_BYTES, "request_sizes"
        )
        self.request_duration_seconds = self._of_requests(
            "request_duration_seconds",
            "From the request's arrival to the end of its response.",
            SECONDS,
            "request_duration_seconds",
        )
        self.request_running = self._gauge(
            "request_running",
            "Requests routed whose response has not ended.",
            REQUEST_LABELS,
            objective("running_requests", MODEL_LABELS[:1]),
        )
        self.request_processing_duration_seconds = self._histogram(
            "request_processing_duration_seconds",
            "Time the picker itself adds to a request.",
            PROCESSING_SECONDS,
        )
        self.model_rewrite_decisions_total = self._counter(
            "model_rewrite_decisions_total",
            "Models replaced by rewrite rules.",
            ("model_rewrite_name", "model_name", "target_model"),
            extension(
                "model_rewrite_decisions_total",
                ("model_rewrite_name", "model_name", "target_model"),
            ),
        )
        self.request_outcomes_total = self._own_counter(
            "request_outcomes_total", "Requests by the one cause that ended them.", ("cause",)
        )
        self.plugin_failures_total = self._own_counter(
            "plugin_failures_total", "Calls of plugins that failed by mistake.", ("plugin",)
        )

    def _declare_responses(self) -> None:
        self.response_size_bytes = self._of_requests(
            "response_size_bytes", "Body size of responses.", RESPONSE_BYTES, "response_sizes"
        )
        self.request_input_tokens = self._of_requests(
            "request_input_tokens",
            "Prompt tokens that responses tell.",
            INPUT_TOKENS,
            "input_tokens",
        )
        self.request_output_tokens = self._of_requests(
            "request_output_tokens",
            "Generated tokens that responses tell.",
            OUTPUT_TOKENS,
            "output_tokens",
        )
        self.request_cached_tokens = self._of_requests(
            "request_cached_tokens",
            "Prompt tokens found in a cache, as responses tell.",
            INPUT_TOKENS,
            "prompt_cached_tokens",
        )

    def _declare_response_times(self) -> None:
        self.request_ntpot_seconds = self._of_requests(
            "request_ntpot_seconds",
            "Duration of a request per generated token.",
            NTPOT_SECONDS,
            "normalized_time_per_output_token_seconds",
        )
        self.request_ttft_seconds = self._histogram(
            "request_ttft_seconds",
            "From a request's arrival to the first piece of its response.",
            TTFT_SECONDS,
            (*REQUEST_LABELS, "streaming"),
        )
        self.request_streaming_tpot_seconds = self._histogram(
            "request_streaming_tpot_seconds",
            "Time per token after the first one, of streaming responses.",
            TPOT_SECONDS,
            REQUEST_LABELS,
        )
        self.request_streaming_itl_seconds = self._histogram(
            "request_streaming_itl_seconds",
            "Time between two pieces of a streaming response.",
            ITL_SECONDS,
            REQUEST_LABELS,
        )
        self.response_processing_duration_seconds = self._histogram(
            "response_processing_duration_seconds",
            "Time the picker itself adds to a response.",
            RESPONSE_PROCESSING_SECONDS,
        )

    def _declare_decisions(self) -> None:
        self.scheduler_e2e_duration_seconds = self._histogram(
            "scheduler_e2e_duration_seconds",
            "Duration of one scheduling decision.",
            FAST_SECONDS,
            twins=extension("scheduler_e2e_duration_seconds"),
        )
        attempt = ("status", "target_model_name", "endpoint_name", "namespace", "port")
        self.scheduler_attempts_total = self._counter(
            "scheduler_attempts_total",
            "Scheduling decisions by outcome and first endpoint.",
            attempt,
            (Twin(EXTENSION_PREFIX + "scheduler_attempts_total", attempt, ENDPOINT_RENAMED),),
        )
        self.plugin_duration_seconds = self._histogram(
            "plugin_duration_seconds",
            "Duration of one call of a plugin.",
            FAST_SECONDS,
            PLUGIN_LABELS,
            extension("plugin_duration_seconds", PLUGIN_LABELS),
        )
        self.plugin_data_scope_violations_total = self._counter(
            "plugin_data_scope_violations_total",
            "Findings that a plugin touched without having declared it.",
            (*PLUGIN_LABELS, "access"),
        )
        plugin = ("plugin_name", "plugin_type")
        self.prefix_indexer_size = self._gauge(
            "prefix_indexer_size",
            "Block hashes in the prefix index.",
            plugin,
            extension("prefix_indexer_size"),
        )
        self.prefix_indexer_hit_ratio = self._histogram(
            "prefix_indexer_hit_ratio",
            "Share of a prompt's blocks that the best endpoint holds.",
            RATIOS,
            plugin,
            extension("prefix_indexer_hit_ratio"),
        )
        self.prefix_indexer_hit_bytes = self._histogram(
            "prefix_indexer_hit_bytes",
            "Prompt bytes (four a token) that the best endpoint holds.",
            HIT_BYTES,
            plugin,
            extension("prefix_indexer_hit_bytes"),
        )

    def _declare_pool(self) -> None:
        build = ("commit", "build_ref")
        self.info = self._gauge(
            "info", "Always 1; says what runs.", build, extension("info", build)
        )
        source = ("source_type",)
        self.datalayer_poll_errors_total = self._counter(
            "datalayer_poll_errors_total",
            "Scrapes that failed.",
            source,
            (Twin(SCHEDULER_PREFIX + "datalayer_poll_errors_total", source),),
        )
        extraction = ("source_type", "extractor_type")
        self.datalayer_extract_errors_total = self._counter(
            "datalayer_extract_errors_total",
            "Scraped pages that lacked a series or had an unusable value.",
            extraction,
            (Twin(SCHEDULER_PREFIX + "datalayer_extract_errors_total", extraction),),
        )
        self.discovery_errors_total = self._own_counter(
            "discovery_errors_total",
            "What was skipped of endpoints files or of a cluster's objects, and unusable files.",
        )

    def _declare_config(self) -> None:
        self.unknown_pool_total = self._own_counter(
            "unknown_pool_total",
            "Requests refused by a picker of several pools because the proxy named none of them.",
        )
        self.admin_failures_total = self._own_counter(
            "admin_failures_total",
            "Requests at the HTTP port that an unforeseen error kept from being answered, by page.",
            ("page",),
        )
        self.config_reloads_total = self._own_counter(
            "config_reloads_total",
            "Changes of the configuration file, by whether they could be applied.",
            ("result",),
        )
        self.config_last_reload_successful = self._own_gauge(
            "config_last_reload_successful",
            "1 while the configuration file is what the picker works by, 0 after a bad change.",
        )
        self.config_last_reload_success_timestamp_seconds = self._own_gauge(
            "config_last_reload_success_timestamp_seconds",
            "When the configuration in use was loaded, in seconds since 1970.",
        )


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """`metric`, a gauge, under another name and with some labels called otherwise."""
    twin = Metric(name, f"Deprecated: use {metric.name}.", metric.type)
    for sample in metric.samples:
        own = {labels.get(label, label): value for label, value in sample.labels.items()}
        twin.add_sample(name, own, sample.value)
    return twin


def gauge_family(name: str, text: str, labels: Iterable[str]) -> GaugeMetricFamily:
    """A gauge computed at collection time, under the common prefix."""
    return GaugeMetricFamily(PREFIX + name, text, labels=tuple(labels))


__all__ = ["CONTENT_TYPE", "BoundedLabels", "Collector", "Metric", "PickerMetrics", "gauge_family"]
