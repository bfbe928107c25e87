"""Every series the picker exposes, declared once.

Names, labels and buckets are those of the reference picker (prefix `llm_d_epp_`), so that its
dashboards and alerts work unchanged, and so are the deprecated names that it still exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector as LibraryCollector

from base.series import AnySeries, Computed, metrics_of, text_of
from picker.metrics.declarations import (
    EXTENSION_PREFIX,
    FAST_SECONDS,
    HIT_BYTES,
    INPUT_TOKENS,
    ITL_SECONDS,
    MODEL_LABELS,
    NTPOT_SECONDS,
    OBJECTIVE_PREFIX,
    OUTPUT_TOKENS,
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
    Deprecated,
    Family,
    counter,
    gauge,
    histogram,
    of_requests,
    own_counter,
    own_gauge,
)
from picker.metrics.families import (
    PLUGIN,
    AutoscaleSeries,
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
from picker.metrics.label_caps import PageRoom, RequestLabels

LINES = 200  # of the page, written before other tasks run
T = TypeVar("T")

PLUGIN_LABELS = ("extension_point", "plugin_type", "plugin_name")
_EXTENSION = Deprecated(EXTENSION_PREFIX)
_UNLABELLED = Deprecated(EXTENSION_PREFIX, ())


class Collector(Protocol):
    def collect(self) -> Iterator[Computed]: ...


class _OfLibrary(LibraryCollector):
    def __init__(self, series: Callable[[], Iterable[AnySeries | Computed]]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for one in self._series():
            yield from metrics_of(one)


class PickerMetrics(Family):
    """Owns all series; `registry` shows them to `prometheus_client`."""

    request_total = counter(
        "Requests routed.",
        REQUEST_LABELS,
        Deprecated(OBJECTIVE_PREFIX, (*MODEL_LABELS, "priority")),
    )
    request_error_total = counter(
        "Requests that ended in an error, by error code.",
        (*REQUEST_LABELS, "error_code"),
        Deprecated(OBJECTIVE_PREFIX, (*MODEL_LABELS, "error_code")),
    )
    request_size_bytes = of_requests(
        "Body size of routed requests.", REQUEST_BYTES, "request_sizes"
    )
    request_duration_seconds = of_requests(
        "From the request's arrival to the end of its response.", SECONDS
    )
    request_running = gauge(
        "Requests routed whose response has not ended.",
        REQUEST_LABELS,
        Deprecated(OBJECTIVE_PREFIX, MODEL_LABELS[:1], "running_requests"),
    )
    request_processing_duration_seconds = histogram(
        "Time the picker itself adds to a request.", PROCESSING_SECONDS
    )
    model_rewrite_decisions_total = counter(
        "Models replaced by rewrite rules.",
        ("model_rewrite_name", "model_name", "target_model"),
        _EXTENSION,
    )
    request_outcomes_total = own_counter("Requests by the one cause that ended them.", ("cause",))
    request_features_total = own_counter(
        "Routed requests that offer tools or ask for an answer of a given form, by feature.",
        ("feature",),
    )
    plugin_failures_total = own_counter(
        "Calls of plugins that raised unexpected errors.", ("plugin",)
    )

    response_size_bytes = of_requests("Body size of responses.", RESPONSE_BYTES, "response_sizes")
    request_input_tokens = of_requests(
        "Prompt tokens, as responses report them.", INPUT_TOKENS, "input_tokens"
    )
    request_output_tokens = of_requests(
        "Generated tokens, as responses report them.", OUTPUT_TOKENS, "output_tokens"
    )
    request_cached_tokens = of_requests(
        "Prompt tokens found in a cache, as responses report them.",
        INPUT_TOKENS,
        "prompt_cached_tokens",
    )
    request_ntpot_seconds = of_requests(
        "Duration of a request per generated token.",
        NTPOT_SECONDS,
        "normalized_time_per_output_token_seconds",
    )
    request_ttft_seconds = histogram(
        "From a request's arrival to the first piece of its response.",
        TTFT_SECONDS,
        (*REQUEST_LABELS, "streaming"),
    )
    request_streaming_tpot_seconds = histogram(
        "Time per token after the first one, of streaming responses.", TPOT_SECONDS, REQUEST_LABELS
    )
    request_streaming_itl_seconds = histogram(
        "Time between two pieces of a streaming response.", ITL_SECONDS, REQUEST_LABELS
    )
    response_processing_duration_seconds = histogram(
        "Time the picker itself adds to a response.", RESPONSE_PROCESSING_SECONDS
    )

    scheduler_e2e_duration_seconds = histogram(
        "Duration of one scheduling decision.", FAST_SECONDS, twin=_EXTENSION
    )
    scheduler_attempts_total = counter(
        "Scheduling decisions by outcome and first endpoint.",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        Deprecated(EXTENSION_PREFIX, renamed={"endpoint_name": "pod_name"}),
    )
    plugin_duration_seconds = histogram(
        "Duration of one call of a plugin.", FAST_SECONDS, PLUGIN_LABELS, _EXTENSION
    )
    plugin_data_scope_violations_total = counter(
        "Attributes that a plugin used without declaring it.", (*PLUGIN_LABELS, "access")
    )
    prefix_indexer_size = gauge("Block hashes in the prefix index.", PLUGIN, _UNLABELLED)
    prefix_indexer_hit_ratio = histogram(
        "Share of a prompt's blocks that the best endpoint holds.", RATIOS, PLUGIN, _UNLABELLED
    )
    prefix_indexer_hit_bytes = histogram(
        "Prompt bytes (four a token) that the best endpoint holds.", HIT_BYTES, PLUGIN, _UNLABELLED
    )

    info = gauge("Always 1; the labels name the build.", ("commit", "build_ref"), _EXTENSION)
    datalayer_poll_errors_total = counter(
        "Scrapes that failed.", ("source_type",), Deprecated(SCHEDULER_PREFIX)
    )
    datalayer_extract_errors_total = counter(
        "Scraped pages that lacked a series or had an unusable value.",
        ("source_type", "extractor_type"),
        Deprecated(SCHEDULER_PREFIX),
    )
    discovery_errors_total = own_counter(
        "Skipped parts of endpoints files or of a cluster's objects, and unusable files."
    )
    unknown_pool_total = own_counter(
        "Requests refused by a picker of several pools because the proxy named none of them."
    )
    unknown_model_total = own_counter(
        "Requests refused by a picker of several pools because none of them has the model."
    )
    admin_failures_total = own_counter(
        "Requests at the HTTP port that failed with an unexpected error, by page.",
        ("page",),
    )
    certificate_expiry_timestamp_seconds = own_gauge(
        "Expiry of the certificate that a flag names, in seconds since 1970.", ("flag",)
    )
    config_reloads_total = own_counter("Changes of the configuration file, by result.", ("result",))
    config_last_reload_successful = own_gauge(
        "1 while the configuration file is in use, 0 after a change that could not be applied."
    )
    config_last_reload_success_timestamp_seconds = own_gauge(
        "Time at which the configuration in use was loaded, in seconds since 1970."
    )

    def __init__(self, room: PageRoom | None = None) -> None:
        declared: list[AnySeries] = []
        super().__init__(declared)
        self.series: Sequence[AnySeries] = declared  # in the order of the exposition
        self.labels = RequestLabels(room)
        self._collectors: list[Collector] = []
        self.registry = CollectorRegistry()
        self.plugins = PluginSeries(declared)
        self.streams = StreamSeries(declared)
        self.health = HealthSeries(declared)
        self.kv = KvSeries(declared)
        self.recording = RecordingSeries(declared)
        self.flow = FlowSeries(declared)
        self.peers = PeerSeries(declared)
        self.kubernetes = KubernetesSeries(declared)
        self.xds = XdsSeries(declared)
        self.autoscale = AutoscaleSeries(declared)
        self.registry.register(_OfLibrary(lambda: chain(self.series, self._computed())))

    @property
    def of_process(self) -> Sequence[AnySeries]:
        xds = self.xds
        return (
            self.info,
            self.unknown_pool_total,
            self.unknown_model_total,
            self.admin_failures_total,
            self.certificate_expiry_timestamp_seconds,
            *self.streams.all,
            *(xds.clients, xds.responses_total, xds.acks_total, xds.nacks_total),
            *self.kubernetes.election.all,
        )

    def pieces(self, series: Iterable[AnySeries] | None = None) -> Iterator[list[str]]:
        """Yield the exposition as lists of lines, each written in a millisecond or two. The numbers
        of one series are of one moment, those of two series need not be.
        """
        declared = self.series if series is None else series
        yield from batched((line for one in declared for line in text_of(one)), LINES)
        for computed in self._computed():  # here, so it is a piece by itself
            yield from batched(text_of(computed), LINES)

    def render(self, series: Iterable[AnySeries] | None = None) -> bytes:
        return b"".join(map(encoded, self.pieces(series)))

    def register(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def _computed(self) -> Iterator[Computed]:
        for collector in self._collectors:
            yield from collector.collect()


def encoded(lines: Iterable[str]) -> bytes:
    """Encode lines of the page; invalid characters in names become `?`."""
    return "".join(lines).encode(errors="replace")


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch
