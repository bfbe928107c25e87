"""Every series the picker exposes: a family for each package that reports, and `PickerMetrics`,
which owns all of them. A package receives its own family and nothing else.

Names, labels and buckets are those of the reference picker (prefix `llm_d_epp_`), including the
deprecated names that it still exports, so that its dashboards and alerts work unchanged. A test
compares them with docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector as LibraryCollector

from base.series import AnySeries, Computed, Counter, Histogram, metrics_of, text_of
from picker.metrics.declarations import (
    EXTENSION_PREFIX,
    KV_CACHE_PREFIX,
    MODEL_LABELS,
    OBJECTIVE_PREFIX,
    REQUEST_LABELS,
    SCHEDULER_PREFIX,
    Declared,
    Deprecated,
    Family,
    counter,
    gauge,
    histogram,
    of_requests,
    own_counter,
    own_gauge,
)
from picker.metrics.label_caps import PageRoom, RequestLabels

LINES = 200  # of the page, written before other tasks run
T = TypeVar("T")

SECONDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30),
    *(45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TTFT_SECONDS = SECONDS[:24]  # to two minutes
FAST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
PROCESSING_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RESPONSE_PROCESSING_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5),
)
NTPOT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
ITL_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)
REQUEST_BYTES = tuple(64 * 2**k for k in range(25))
# 32778 is a slip of the reference; sums over both pickers need equal bounds.
RESPONSE_BYTES = (1, *(8 * 2**k for k in range(12)), 32778, 65536)
INPUT_TOKENS = (*RESPONSE_BYTES, 131072, 262144, 524288, 1048576)
OUTPUT_TOKENS = (1, *(8 * 2**k for k in range(11)))
RATIOS = tuple(k / 10 for k in range(11))
ERROR_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
HIT_BYTES = (0, *(16 * 2**k for k in range(13)))
PREDICTED_TPOT_SECONDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.8, 1, 1.5, 2, 3, 4.5, 6, 12, 18, 24, 30, 36, 48, 60, 90, 120, 180, 270, 360),
)
PREDICTION_SECONDS = (0.0001, 0.0005, *FAST_SECONDS[3:], 0.2, 0.5, 1, 2, 5)
STREAM_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)

PLUGIN_LABELS = ("extension_point", "plugin_type", "plugin_name")
_EXTENSION = Deprecated(EXTENSION_PREFIX)
_UNLABELLED = Deprecated(EXTENSION_PREFIX, ())


POOL = ("inference_pool",)
BAND = ("priority", *POOL)
WAITING = ("fairness_id", *BAND, *MODEL_LABELS)
QUEUE_SECONDS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
CONFIRMATION_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class FlowSeries(Family):
    prefix = "flow_control_"

    request_queue_duration_seconds = histogram(
        "Time that a request waited, by outcome.",
        QUEUE_SECONDS,
        ("fairness_id", "priority", "outcome", *POOL, *MODEL_LABELS),
        _EXTENSION,
    )
    dispatch_cycle_duration_seconds = histogram(
        "Duration of one pass over the queues.", FAST_SECONDS, twin=_EXTENSION
    )
    request_enqueue_duration_seconds = histogram(
        "Time to put a request in its queue, or to decide without a queue.",
        FAST_SECONDS,
        ("fairness_id", "priority", "outcome"),
        _EXTENSION,
    )
    queue_size = gauge("Requests that wait.", WAITING, _EXTENSION)
    queue_bytes = gauge("Bytes of the requests that wait.", WAITING, _EXTENSION)
    requests_total = counter("Requests by the outcome of flow control.", ("outcome", *BAND))
    pool_saturation = gauge("Saturation of the pool; 1 is full.", (*POOL, "stage"), _EXTENSION)
    stale_endpoints = gauge(
        "Endpoints whose saturation is estimated without fresh metrics.", ("detector",)
    )
    capacity_utilization_requests = gauge(
        "Share of a band's capacity in requests that is in use.", BAND
    )
    capacity_utilization_bytes = gauge("Share of a band's capacity in bytes that is in use.", BAND)
    global_capacity_utilization_requests = gauge(
        "Share of the total capacity in requests that is in use.", POOL
    )
    global_capacity_utilization_bytes = gauge(
        "Share of the total capacity in bytes that is in use.", POOL
    )
    revocations_issued_total = counter(
        "Running requests that were revoked in favour of a priority.", BAND
    )
    revocations_total = counter(
        "Revocations by outcome: ended, or not in time.", ("outcome", *POOL)
    )
    reclaim_target = gauge("Saturation that the last revocations were meant to free.", POOL)
    pending_reclaim = gauge("Saturation that revocations have yet to free.", POOL)
    revocation_confirmation_seconds = histogram(
        "Time from the revocation of a request to its end.", CONFIRMATION_SECONDS, POOL
    )


class HealthSeries(Family):
    prefix = "endpoint_"

    ejections_total = own_counter(
        "Ejections of an endpoint for its failures.", ("endpoint_name", "namespace")
    )
    probes_total = own_counter("Probe requests to ejected endpoints, by result.", ("result",))
    ejected = own_gauge("Ejected endpoints.", name="endpoints_ejected")


_LABELS = ("resource", "namespace")
_KINDS = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


class KubernetesSeries(Family):
    prefix = "kubernetes_"

    lists_total = own_counter("Lists requested from the API server.", _LABELS)
    watches_total = own_counter("Watches opened at the API server.", _LABELS)
    events_total = own_counter("Events of watches.", (*_LABELS, "type"))
    errors_total = own_counter(
        "Lists and watches that failed, by HTTP status, unreachable or silent.",
        (*_LABELS, "reason"),
    )
    changes_total = own_counter("Changes of the known objects.", _LABELS)
    silent_seconds = own_gauge(
        "Seconds since the API server last sent anything about a selection.", (*_LABELS, "selector")
    )

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.election = ElectionSeries(declared)

    def of(self, resource: str, namespace: str) -> SubjectSeries:
        return SubjectSeries(self, resource, namespace)


class SubjectSeries:
    def __init__(self, series: KubernetesSeries, *labels: str) -> None:
        self._series, self._labels = series, labels
        self.lists = series.lists_total.labels(*labels)
        self.watches = series.watches_total.labels(*labels)
        self.changes = series.changes_total.labels(*labels)

    def count(self, kind: str) -> None:
        """Count an event of a watch; unknown kinds share a label."""
        label = kind if kind in _KINDS else "unknown"
        self._series.events_total.labels(*self._labels, label).inc()

    def count_error(self, reason: str) -> None:
        self._series.errors_total.labels(*self._labels, reason).inc()

    @contextmanager
    def age_shown(self, selector: str, age: Callable[[], float | None]) -> Iterator[None]:
        """Export the time since the last contact while the `with` block runs."""
        labels, gauge = (*self._labels, selector), self._series.silent_seconds
        gauge.labels(*labels).set_function(lambda: age() or 0.0)
        try:
            yield
        finally:
            gauge.remove(*labels)


class ElectionSeries(Family):
    leader = own_gauge("1 while this replica leads.", ("lease",))
    renewal_age_seconds = own_gauge(
        "Seconds since this replica last acquired or renewed the lease.",
        ("lease",),
        "lease_renewal_age_seconds",
    )
    changes_total = own_counter(
        "Changes of leadership of this replica: gained and lost.",
        ("lease", "change"),
        "leader_changes_total",
    )
    errors_total = own_counter(
        "Requests about the lease that failed, by HTTP status or unreachable.",
        ("lease", "reason"),
        "lease_errors_total",
    )

    def of(self, lease: str) -> LeaseSeries:
        return LeaseSeries(lease, self)


@dataclass(frozen=True, slots=True)
class LeaseSeries:
    lease: str
    series: ElectionSeries

    @contextmanager
    def shown(self, is_leader: Callable[[], bool]) -> Iterator[None]:
        """Export whether this replica leads while the `with` block runs."""
        self.series.leader.labels(self.lease).set_function(lambda: float(is_leader()))
        for change in ("gained", "lost"):
            self.series.changes_total.labels(self.lease, change)
        try:
            yield
        finally:
            self.series.leader.remove(self.lease)

    def renewed(self, clock: Callable[[], float]) -> None:
        at = clock()
        age = self.series.renewal_age_seconds.labels(self.lease)
        age.set_function(lambda: clock() - at)

    def count_change(self, change: str) -> None:
        self.series.changes_total.labels(self.lease, change).inc()

    def count_error(self, reason: str) -> None:
        self.series.errors_total.labels(self.lease, reason).inc()


POD = ("pod_identifier",)
# The default bounds of the library, which the reference keeps.
LOOKUP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _of_index(name: str, text: str) -> Declared[Counter]:
    twin = Deprecated(KV_CACHE_PREFIX, name=f"index_{name}")
    return counter(text, twin=twin, name=f"kv_cache_index_{name}")


class KvSeries(Family):
    lookup_requests_total = _of_index("lookup_requests_total", "Prompts that were looked up.")
    lookup_hits_total = _of_index(
        "lookup_hits_total", "Leading blocks of prompts that at least one engine holds."
    )
    max_pod_hit_count_total = _of_index(
        "max_pod_hit_count_total", "Blocks of prompts that the best engine holds."
    )
    lookup_latency_seconds = histogram(
        "Duration of one look-up.",
        LOOKUP_SECONDS,
        twin=Deprecated(KV_CACHE_PREFIX, name="index_lookup_latency_seconds"),
        name="kv_cache_index_lookup_latency_seconds",
    )
    active_subscribers = gauge(
        "Engines, or addresses, to which the picker is subscribed.",
        name="kv_cache_events_active_subscribers",
    )
    messages_received_total = counter(
        "Messages received from engines.", POD, name="kv_cache_events_messages_received_total"
    )
    zmq_errors_total = counter(
        "Messages that could not be decoded, and addresses that could not be reached.",
        (*POD, "operation"),
        name="kv_cache_events_zmq_errors_total",
    )
    skipped_total = own_counter(
        "Events that were skipped, by reason.", (*POD, "reason"), "kv_events_skipped_total"
    )
    replays_total = own_counter(
        "Replays requested from an engine, by result.", (*POD, "result"), "kv_event_replays_total"
    )
    gaps_total = own_counter("Gaps in the messages of an engine.", POD, "kv_event_gaps_total")
    restarts_total = own_counter(
        "Restarts of an engine's message count.", POD, "kv_event_restarts_total"
    )


class PeerSeries(Family):
    prefix = "peer_"

    connected = own_gauge("Replicas to which this one sends its state.", name="peers_connected")
    reporting = own_gauge("Replicas that send their state to this one.", name="peers_heard")
    calls_total = own_counter("Calls to replicas, by result.", ("result",))
    bytes_total = own_counter("Bytes of messages to and from replicas.", ("direction",))
    messages_total = own_counter("Messages to and from replicas.", ("direction",))
    entries_total = own_counter(
        "Placements of prompts and sessions received from replicas, by result.", ("result",)
    )
    batches_missed_total = own_counter("Batches of replicas that did not arrive in sequence.")
    entries_dropped_total = own_counter("Entries that were not sent: too many at once.")
    loads_expired_total = own_counter("Loads of silent replicas that were dropped.")
    messages_refused_total = own_counter(
        "Calls and messages that were refused: invalid, or from other clients."
    )


PLUGIN = ("plugin_name", "plugin_type")
DECISION = ("model_name", "decision_type")
MODALITY = ("plugin_type", "plugin_name", "modality")
MODALITIES = frozenset({"image", "audio", "video"})  # clients may send others
PREDICTION = (*PLUGIN, *MODEL_LABELS)
_TYPED = Deprecated(OBJECTIVE_PREFIX, (*MODEL_LABELS, "type"))


def _decisions() -> Declared[Counter]:
    text = "Requests by the stages that have an endpoint of their own."
    return counter(text, (*PLUGIN, *DECISION), Deprecated(SCHEDULER_PREFIX, DECISION))


def _predicted(text: str, bounds: tuple[float, ...]) -> Declared[Histogram]:
    return histogram(text, bounds, PREDICTION, Deprecated(OBJECTIVE_PREFIX, MODEL_LABELS))


class PluginSeries(Family):
    disagg_decision_total = _decisions()
    pd_decision_total = _decisions()
    disaggregatedset_strict_header_no_match_total = counter(
        "Requests whose strict header selected no endpoint.",
        ("plugin_type", "plugin_name", "selector"),
    )
    encoder_cache_queries_total = counter("Multi-modal items of routed requests.", MODALITY)
    encoder_cache_hits_total = counter(
        "Multi-modal items that the endpoint has probably encoded before.", (*MODALITY, "pod")
    )
    encoder_cache_hit_ratio = histogram(
        "Share of a request's items that its endpoint has probably encoded before.",
        RATIOS,
        MODALITY[:2],
    )
    inference_request_metric = gauge(
        "Predicted and measured latencies of the last request; 1 for a violated objective.",
        (*PREDICTION, "type"),
        _TYPED,
    )
    request_slo_violation_total = counter(
        "Requests that exceeded their latency objective.", (*PREDICTION, "type"), _TYPED
    )
    request_predicted_ttft_seconds = _predicted("Predicted time to the first token.", SECONDS)
    request_predicted_tpot_seconds = _predicted(
        "Predicted time per token after the first.", PREDICTED_TPOT_SECONDS
    )
    request_latency_prediction_error_ratio = histogram(
        "Relative error of a prediction.", ERROR_RATIOS, (*PREDICTION, "type")
    )
    request_latency_p90_total = counter(
        "Predicted p90s, by whether the request stayed within them.", (*PREDICTION, "type", "held")
    )
    request_ttft_prediction_duration_seconds = _predicted(
        "Duration of the prediction.", PREDICTION_SECONDS
    )
    request_tpot_prediction_duration_seconds = _predicted(
        "Duration of the prediction.", PREDICTION_SECONDS
    )


class RecordingSeries(Family):
    prefix = "recording_"

    active = own_gauge("1 while decisions are recorded.")
    bytes_total = own_counter("Bytes written to the recording.")
    lost_lines_total = own_counter("Lines that could not be written to the recording.")


class StreamSeries(Family):
    inflight = gauge("Open ext_proc streams.", name="extproc_streams_inflight")
    duration_seconds = histogram(
        "Lifetime of streams.", STREAM_SECONDS, name="extproc_stream_duration_seconds"
    )
    total = counter("Ended streams, by gRPC status.", ("code",), name="extproc_streams_total")
    reports_total = own_counter(
        "Reports of Envoy on responses (--response-bodies usage): taken, unknown id, or malformed.",
        ("result",),
        name="extproc_response_reports_total",
    )


GROUP = ("group", *POOL)


class AutoscaleSeries(Family):
    prefix = "autoscale_"

    wanted_replicas = own_gauge("Replicas that a group of workers should have.", GROUP)
    current_replicas = own_gauge("Replicas that are requested now, or serve.", GROUP)
    wanted_cost_per_hour = own_gauge("Cost of the wanted replicas per hour.", GROUP)
    writes_total = own_counter(
        "Reads and writes of the scale of Deployments, by ok, HTTP status or unreachable.",
        (*GROUP, "result"),
    )


VARIANT = ("variant",)


class XdsSeries(Family):
    prefix = "xds_"

    clients = own_gauge("Open streams of endpoint discovery.")
    responses_total = own_counter("Responses to clients of endpoint discovery.", VARIANT)
    acks_total = own_counter("Responses that a client has applied.", VARIANT)
    nacks_total = own_counter("Responses that a client has rejected.", VARIANT)
    version = own_gauge("Number of different sets of endpoints so far.")
    endpoints = own_gauge("Endpoints that are published to clients.")


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
        "Requests at the HTTP port that failed with an unexpected error, by page.", ("page",)
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
        of one series belong to one moment; those of two series need not.
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
