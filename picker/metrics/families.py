"""The families of series, one class for each room that reports: `PickerMetrics` owns them all.

A room is handed its family and nothing else, so that its series are read here and their
use is read there. Names, labels and help texts are in docs/metrics.md, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from base.series import AnySeries, Counter, Histogram
from picker.metrics.declarations import (
    ERROR_RATIOS,
    EXTENSION_PREFIX,
    FAST_SECONDS,
    KV_CACHE_PREFIX,
    MODEL_LABELS,
    OBJECTIVE_PREFIX,
    PREDICTED_TPOT_SECONDS,
    PREDICTION_SECONDS,
    RATIOS,
    SCHEDULER_PREFIX,
    SECONDS,
    STREAM_SECONDS,
    Declared,
    Deprecated,
    Family,
    counter,
    gauge,
    histogram,
    own_counter,
    own_gauge,
)

POOL = ("inference_pool",)
BAND = ("priority", *POOL)
MODELS = ("model_name", "target_model_name")
WAITING = ("fairness_id", *BAND, *MODELS)
QUEUE_SECONDS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
CONFIRMATION_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_EXTENSION = Deprecated(EXTENSION_PREFIX)


class FlowSeries(Family):
    """Flow control."""

    prefix = "flow_control_"

    request_queue_duration_seconds = histogram(
        "Time that a request waited, by how that ended.",
        QUEUE_SECONDS,
        ("fairness_id", "priority", "outcome", *POOL, *MODELS),
        _EXTENSION,
    )
    dispatch_cycle_duration_seconds = histogram(
        "Duration of one look at the queues.", FAST_SECONDS, twin=_EXTENSION
    )
    request_enqueue_duration_seconds = histogram(
        "Time that it took to put a request in its queue, or to answer it without that.",
        FAST_SECONDS,
        ("fairness_id", "priority", "outcome"),
        _EXTENSION,
    )
    queue_size = gauge("Requests that wait.", WAITING, _EXTENSION)
    queue_bytes = gauge("Bytes of the requests that wait.", WAITING, _EXTENSION)
    requests_total = counter("Requests by how their time at the gate ended.", ("outcome", *BAND))
    pool_saturation = gauge("How full the pool is; 1 is full.", (*POOL, "stage"), _EXTENSION)
    stale_endpoints = gauge("Endpoints judged without fresh metrics.", ("detector",))
    capacity_utilization_requests = gauge("Share of a band's requests that is taken.", BAND)
    capacity_utilization_bytes = gauge("Share of a band's bytes that is taken.", BAND)
    global_capacity_utilization_requests = gauge("Share of all requests that is taken.", POOL)
    global_capacity_utilization_bytes = gauge("Share of all bytes that is taken.", POOL)
    revocations_issued_total = counter(
        "Requests under way that were stopped in favour of a priority.", BAND
    )
    revocations_total = counter(
        "Those that were then over, and those that took too long.", ("outcome", *POOL)
    )
    reclaim_target = gauge("Saturation that the last of them were to free.", POOL)
    pending_reclaim = gauge("Saturation that is still to be freed.", POOL)
    revocation_confirmation_seconds = histogram(
        "From a request's being stopped to its end.", CONFIRMATION_SECONDS, POOL
    )


class HealthSeries(Family):
    """Outlier ejection."""

    ejections_total = own_counter(
        "Times that an endpoint was ejected for its failures.",
        ("endpoint_name", "namespace"),
        "endpoint_ejections_total",
    )
    probes_total = own_counter(
        "Requests that tried out an ejected endpoint, by what they found.",
        ("result",),
        "endpoint_probes_total",
    )
    ejected = own_gauge("Endpoints that are ejected now.", name="endpoints_ejected")


_LABELS = ("resource", "namespace")
_KINDS = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


class KubernetesSeries(Family):
    """Lists and watches; `election` is about leadership."""

    prefix = "kubernetes_"

    lists_total = own_counter("Lists asked of the API server.", _LABELS)
    watches_total = own_counter("Watches opened at the API server.", _LABELS)
    events_total = own_counter("Events of watches.", (*_LABELS, "type"))
    errors_total = own_counter(
        "Lists and watches that failed, by HTTP status, unreachable or silent.",
        (*_LABELS, "reason"),
    )
    changes_total = own_counter("Times that the known objects changed.", _LABELS)
    silent_seconds = own_gauge(
        "Seconds since the API server was last heard of a selection.", (*_LABELS, "selector")
    )

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.election = ElectionSeries(declared)

    def of(self, resource: str, namespace: str) -> SubjectSeries:
        """Those of one subject."""
        return SubjectSeries(self, resource, namespace)


class SubjectSeries:
    """The series with the labels of one subject."""

    def __init__(self, series: KubernetesSeries, *labels: str) -> None:
        self._series, self._labels = series, labels
        self.lists = series.lists_total.labels(*labels)
        self.watches = series.watches_total.labels(*labels)
        self.changes = series.changes_total.labels(*labels)

    def count(self, kind: str) -> None:
        """An event of a watch; kinds that do not exist share a label."""
        label = kind if kind in _KINDS else "unknown"
        self._series.events_total.labels(*self._labels, label).inc()

    def count_error(self, reason: str) -> None:
        """A list or a watch that failed."""
        self._series.errors_total.labels(*self._labels, reason).inc()

    @contextmanager
    def age_shown(self, selector: str, age: Callable[[], float | None]) -> Iterator[None]:
        """Export the time since the last contact, for the length of the block."""
        labels, gauge = (*self._labels, selector), self._series.silent_seconds
        gauge.labels(*labels).set_function(lambda: age() or 0.0)
        try:
            yield
        finally:
            gauge.remove(*labels)


class ElectionSeries(Family):
    """The series of leadership; none without an election."""

    leader = own_gauge("1 while this replica leads.", ("lease",))
    renewal_age_seconds = own_gauge(
        "Seconds since this replica last took or renewed the lease.",
        ("lease",),
        "lease_renewal_age_seconds",
    )
    changes_total = own_counter(
        "Times that this replica began and ceased to lead.",
        ("lease", "change"),
        "leader_changes_total",
    )
    errors_total = own_counter(
        "Requests about the lease that failed, by HTTP status or unreachable.",
        ("lease", "reason"),
        "lease_errors_total",
    )

    def of(self, lease: str) -> LeaseSeries:
        """Those of one lease."""
        return LeaseSeries(lease, self)


@dataclass(frozen=True, slots=True)
class LeaseSeries:
    """The series with the label of one lease."""

    lease: str
    series: ElectionSeries

    @contextmanager
    def shown(self, is_leader: Callable[[], bool]) -> Iterator[None]:
        """Export whether this replica leads, for the length of the block."""
        self.series.leader.labels(self.lease).set_function(lambda: float(is_leader()))
        for change in ("gained", "lost"):
            self.series.changes_total.labels(self.lease, change)
        try:
            yield
        finally:
            self.series.leader.remove(self.lease)

    def renewed(self, clock: Callable[[], float]) -> None:
        """The lease was written at this moment of `clock`."""
        at = clock()
        age = self.series.renewal_age_seconds.labels(self.lease)
        age.set_function(lambda: clock() - at)

    def count_change(self, change: str) -> None:
        """Leading began or ended."""
        self.series.changes_total.labels(self.lease, change).inc()

    def count_error(self, reason: str) -> None:
        """A request that failed."""
        self.series.errors_total.labels(self.lease, reason).inc()


POD = ("pod_identifier",)
# The library's own bounds, which the reference leaves as they are.
LOOKUP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _of_index(name: str, text: str) -> Declared[Counter]:
    twin = Deprecated(KV_CACHE_PREFIX, name=f"index_{name}")
    return counter(text, twin=twin, name=f"kv_cache_index_{name}")


class KvSeries(Family):
    """KV-cache events and the index made of them."""

    lookup_requests_total = _of_index("lookup_requests_total", "Prompts that were looked up.")
    lookup_hits_total = _of_index(
        "lookup_hits_total", "Blocks of prompts, from their beginning, that some engine holds."
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
        "Engines, or addresses, that are listened to.", name="kv_cache_events_active_subscribers"
    )
    messages_received_total = counter(
        "Messages of engines.", POD, name="kv_cache_events_messages_received_total"
    )
    zmq_errors_total = counter(
        "Messages that could not be understood, and addresses that could not be reached.",
        (*POD, "operation"),
        name="kv_cache_events_zmq_errors_total",
    )
    skipped_total = own_counter(
        "Events that were left out of their messages, by why.",
        (*POD, "reason"),
        "kv_events_skipped_total",
    )
    replays_total = own_counter(
        "Times that an engine was asked for messages again, by how that ended.",
        (*POD, "result"),
        "kv_event_replays_total",
    )
    gaps_total = own_counter(
        "Times that messages of an engine were missing.", POD, "kv_event_gaps_total"
    )
    restarts_total = own_counter(
        "Times that an engine began to count anew.", POD, "kv_event_restarts_total"
    )


class PeerSeries(Family):
    """Replicas that tell each other."""

    prefix = "peer_"

    connected = own_gauge("Replicas that this one tells what it does.", name="peers_connected")
    heard = own_gauge("Replicas that tell this one what they do.", name="peers_heard")
    calls_total = own_counter("Calls to replicas, by how they ended.", ("result",))
    bytes_total = own_counter("Bytes of messages to and from replicas.", ("direction",))
    messages_total = own_counter("Messages to and from replicas.", ("direction",))
    entries_total = own_counter(
        "Placements of prompts and sessions that replicas told, by what became of them.",
        ("result",),
    )
    batches_missed_total = own_counter("Batches of replicas that did not come in their turn.")
    entries_dropped_total = own_counter("Entries that were not told: too many at once.")
    loads_expired_total = own_counter("Times that the load of a silent replica was dropped.")
    messages_refused_total = own_counter(
        "Calls and messages of replicas that were refused: not understood, or of others."
    )


PLUGIN = ("plugin_name", "plugin_type")
DECISION = ("model_name", "decision_type")
MODALITY = ("plugin_type", "plugin_name", "modality")
MODALITIES = frozenset({"image", "audio", "video"})  # clients may name others
PREDICTION = (*PLUGIN, *MODEL_LABELS)
_TYPED = Deprecated(OBJECTIVE_PREFIX, (*MODEL_LABELS, "type"))


def _decisions() -> Declared[Counter]:
    text = "Requests by the stages that got an endpoint of their own."
    return counter(text, (*PLUGIN, *DECISION), Deprecated(SCHEDULER_PREFIX, DECISION))


def _predicted(text: str, bounds: tuple[float, ...]) -> Declared[Histogram]:
    return histogram(text, bounds, PREDICTION, Deprecated(OBJECTIVE_PREFIX, MODEL_LABELS))


class PluginSeries(Family):
    """Single types of plugins."""

    disagg_decision_total = _decisions()
    pd_decision_total = _decisions()
    disaggregatedset_strict_header_no_match_total = counter(
        "Requests whose strict header selected no endpoint.",
        ("plugin_type", "plugin_name", "selector"),
    )
    encoder_cache_queries_total = counter("Multi-modal items of requests that left.", MODALITY)
    encoder_cache_hits_total = counter(
        "Those that their endpoint is believed to have encoded before.", (*MODALITY, "pod")
    )
    encoder_cache_hit_ratio = histogram(
        "Share of a request's items that its endpoint is believed to have encoded.",
        RATIOS,
        MODALITY[:2],
    )
    inference_request_metric = gauge(
        "Latencies of the last request, predicted and measured; 1 for one that was too long.",
        (*PREDICTION, "type"),
        _TYPED,
    )
    request_slo_violation_total = counter(
        "Requests that took longer than they asked for.", (*PREDICTION, "type"), _TYPED
    )
    request_predicted_ttft_seconds = _predicted("Predicted time to the first token.", SECONDS)
    request_predicted_tpot_seconds = _predicted(
        "Predicted time per token after it.", PREDICTED_TPOT_SECONDS
    )
    request_latency_prediction_error_ratio = histogram(
        "How far a prediction was off, as a share of what the request took.",
        ERROR_RATIOS,
        (*PREDICTION, "type"),
    )
    request_latency_p90_total = counter(
        "Predicted p90s by whether the request took no longer.", (*PREDICTION, "type", "held")
    )
    request_ttft_prediction_duration_seconds = _predicted(
        "Time that the prediction took.", PREDICTION_SECONDS
    )
    request_tpot_prediction_duration_seconds = _predicted(
        "Time that the prediction took.", PREDICTION_SECONDS
    )


class RecordingSeries(Family):
    """The recording of decisions."""

    prefix = "recording_"

    active = own_gauge("1 while decisions are recorded.")
    bytes_total = own_counter("Written to the recording.")
    lost_lines_total = own_counter("Lines that could not be written to the recording.")


class StreamSeries(Family):
    """Streams of ext_proc."""

    inflight = gauge("ext_proc streams that are open.", name="extproc_streams_inflight")
    duration_seconds = histogram(
        "How long streams were open.", STREAM_SECONDS, name="extproc_stream_duration_seconds"
    )
    total = counter(
        "Streams that ended, by their gRPC status.", ("code",), name="extproc_streams_total"
    )


GROUP = ("group", *POOL)


class AutoscaleSeries(Family):
    """How many replicas a pool needs; none without `--autoscale`."""

    prefix = "autoscale_"

    wanted_replicas = own_gauge("Replicas that a group of workers should have.", GROUP)
    current_replicas = own_gauge("Replicas that are asked for now, or serve.", GROUP)
    wanted_cost_per_hour = own_gauge("What the wanted replicas cost in an hour.", GROUP)
    writes_total = own_counter(
        "Reads and writes of the scale of Deployments, by ok, HTTP status or unreachable.",
        (*GROUP, "result"),
    )


VARIANT = ("variant",)


class XdsSeries(Family):
    """Endpoint discovery."""

    prefix = "xds_"

    clients = own_gauge("Streams of endpoint discovery now open.")
    responses_total = own_counter("Responses to clients of endpoint discovery.", VARIANT)
    acks_total = own_counter("Responses that a client has taken over.", VARIANT)
    nacks_total = own_counter("Responses that a client has refused.", VARIANT)
    version = own_gauge("How many different sets of endpoints there have been to tell of.")
    endpoints = own_gauge("Endpoints that clients are told of.")
