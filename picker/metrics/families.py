"""The families of series, one class for each room that reports: `PickerMetrics` declares them all.

A room is handed its family and nothing else, so that its series are read here and their
use is read there. Names, labels and help texts are in docs/metrics.md, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from picker.metrics.declarations import (
    EXTENSION_PREFIX,
    FAST_SECONDS,
    KV_CACHE_PREFIX,
    MODEL_LABELS,
    PREDICTED_TPOT_SECONDS,
    PREDICTION_SECONDS,
    RATIOS,
    SCHEDULER_PREFIX,
    SECONDS,
    STREAM_SECONDS,
    Declarations,
    extension,
    objective,
)
from picker.metrics.label_caps import BoundedLabels
from picker.metrics.series import AnySeries, Counter, Gauge, Histogram, Twin

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
    """Declares the family; `declared` collects the series for the page."""

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


ENDPOINT = ("endpoint_name", "namespace")


class HealthSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.ejections_total = self._own_counter(
            "endpoint_ejections_total",
            "Times that an endpoint was ejected for its failures.",
            ENDPOINT,
        )
        self.probes_total = self._own_counter(
            "endpoint_probes_total",
            "Requests that tried out an ejected endpoint, by what they found.",
            ("result",),
        )
        self.ejected = self._own_gauge("endpoints_ejected", "Endpoints that are ejected now.")


_LABELS = ("resource", "namespace")
_KINDS = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


class KubernetesSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.lists_total = self._own_counter(
            "kubernetes_lists_total", "Lists asked of the API server.", _LABELS
        )
        self.watches_total = self._own_counter(
            "kubernetes_watches_total", "Watches opened at the API server.", _LABELS
        )
        self.events_total = self._own_counter(
            "kubernetes_events_total", "Events of watches.", (*_LABELS, "type")
        )
        self.errors_total = self._own_counter(
            "kubernetes_errors_total",
            "Lists and watches that failed, by HTTP status, unreachable or silent.",
            (*_LABELS, "reason"),
        )
        self.changes_total = self._own_counter(
            "kubernetes_changes_total", "Times that the known objects changed.", _LABELS
        )
        self.age_seconds = self._own_gauge(
            "kubernetes_silent_seconds",
            "Seconds since the API server was last heard of a selection.",
            (*_LABELS, "selector"),
        )

        self.election = ElectionSeries(declared)

    def of(self, resource: str, namespace: str) -> SubjectSeries:
        """Those of one subject."""
        return SubjectSeries(
            resource,
            namespace,
            lists=self.lists_total.labels(resource, namespace),
            watches=self.watches_total.labels(resource, namespace),
            changes=self.changes_total.labels(resource, namespace),
            events=self.events_total,
            errors=self.errors_total,
            age=self.age_seconds,
        )


@dataclass(frozen=True, slots=True)
class SubjectSeries:
    """The series with the labels of one subject."""

    resource: str
    namespace: str
    lists: Counter
    watches: Counter
    changes: Counter
    events: Counter
    errors: Counter
    age: Gauge

    def count(self, kind: str) -> None:
        """An event of a watch; kinds that do not exist share a label."""
        label = kind if kind in _KINDS else "unknown"
        self.events.labels(self.resource, self.namespace, label).inc()

    def count_error(self, reason: str) -> None:
        """A list or a watch that failed."""
        self.errors.labels(self.resource, self.namespace, reason).inc()

    @contextmanager
    def age_shown(self, selector: str, age: Callable[[], float | None]) -> Iterator[None]:
        """Export the time since the last contact, for the length of the block."""
        began = self.age.labels(self.resource, self.namespace, selector)
        began.set_function(lambda: age() or 0.0)
        try:
            yield
        finally:
            self.age.remove(self.resource, self.namespace, selector)


class ElectionSeries(Declarations):
    """The series of leadership; none without an election."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.leader = self._own_gauge("leader", "1 while this replica leads.", ("lease",))
        self.renewal_age_seconds = self._own_gauge(
            "lease_renewal_age_seconds",
            "Seconds since this replica last took or renewed the lease.",
            ("lease",),
        )
        self.changes_total = self._own_counter(
            "leader_changes_total",
            "Times that this replica began and ceased to lead.",
            ("lease", "change"),
        )
        self.errors_total = self._own_counter(
            "lease_errors_total",
            "Requests about the lease that failed, by HTTP status or unreachable.",
            ("lease", "reason"),
        )
        self.all = (self.leader, self.renewal_age_seconds, self.changes_total, self.errors_total)

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


class KvSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.lookup_requests_total = self._of_index(
            "lookup_requests_total", "Prompts that were looked up."
        )
        self.lookup_hits_total = self._of_index(
            "lookup_hits_total", "Blocks of prompts, from their beginning, that some engine holds."
        )
        self.max_pod_hit_count_total = self._of_index(
            "max_pod_hit_count_total", "Blocks of prompts that the best engine holds."
        )
        self.lookup_latency_seconds = self._histogram(
            "kv_cache_index_lookup_latency_seconds",
            "Duration of one look-up.",
            LOOKUP_SECONDS,
            twins=(Twin(KV_CACHE_PREFIX + "index_lookup_latency_seconds"),),
        )
        self.active_subscribers = self._gauge(
            "kv_cache_events_active_subscribers", "Engines, or addresses, that are listened to."
        )
        self.messages_received_total = self._counter(
            "kv_cache_events_messages_received_total", "Messages of engines.", POD
        )
        self.zmq_errors_total = self._counter(
            "kv_cache_events_zmq_errors_total",
            "Messages that could not be understood, and addresses that could not be reached.",
            (*POD, "operation"),
        )
        self.replays_total = self._own_counter(
            "kv_event_replays_total",
            "Times that an engine was asked for messages again, by how that ended.",
            (*POD, "result"),
        )
        self.gaps_total = self._own_counter(
            "kv_event_gaps_total", "Times that messages of an engine were missing.", POD
        )
        self.restarts_total = self._own_counter(
            "kv_event_restarts_total", "Times that an engine began to count anew.", POD
        )

    def _of_index(self, name: str, text: str) -> Counter:
        twins = (Twin(f"{KV_CACHE_PREFIX}index_{name}"),)
        return self._counter(f"kv_cache_index_{name}", text, twins=twins)


class PeerSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.connected = self._own_gauge(
            "peers_connected", "Replicas that this one tells what it does."
        )
        self.heard = self._own_gauge("peers_heard", "Replicas that tell this one what they do.")
        self.calls_total = self._own_counter(
            "peer_calls_total",
            "Calls to replicas, by how they ended.",
            ("result",),
        )
        self.bytes_total = self._own_counter(
            "peer_bytes_total", "Bytes of messages to and from replicas.", ("direction",)
        )
        self.messages_total = self._own_counter(
            "peer_messages_total", "Messages to and from replicas.", ("direction",)
        )
        self.entries_total = self._own_counter(
            "peer_entries_total",
            "Placements of prompts and sessions that replicas told, by what became of them.",
            ("result",),
        )
        self.batches_missed_total = self._own_counter(
            "peer_batches_missed_total", "Batches of replicas that did not come in their turn."
        )
        self.entries_dropped_total = self._own_counter(
            "peer_entries_dropped_total", "Entries that were not told: too many at once."
        )
        self.loads_expired_total = self._own_counter(
            "peer_loads_expired_total", "Times that the load of a silent replica was dropped."
        )
        self.messages_refused_total = self._own_counter(
            "peer_messages_refused_total",
            "Calls and messages of replicas that were refused: not understood, or of others.",
        )


PLUGIN = ("plugin_name", "plugin_type")
DECISION = ("model_name", "decision_type")
MAX_MODALITIES = 16  # some clients name them
PREDICTION = (*PLUGIN, *MODEL_LABELS)


class PluginSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self._declare_disaggregation()
        self._declare_encoder_caches()
        self._declare_predictions()

    def _declare_disaggregation(self) -> None:
        self.disagg_decision_total = self._decisions("disagg_decision_total")
        self.pd_decision_total = self._decisions("pd_decision_total")
        self.disaggregatedset_strict_header_no_match_total = self._counter(
            "disaggregatedset_strict_header_no_match_total",
            "Requests whose strict header selected no endpoint.",
            ("plugin_type", "plugin_name", "selector"),
        )

    def _declare_encoder_caches(self) -> None:
        self.modality_labels = BoundedLabels(MAX_MODALITIES)
        labels = ("plugin_type", "plugin_name", "modality")
        self.encoder_cache_queries_total = self._counter(
            "encoder_cache_queries_total", "Multi-modal items of requests that left.", labels
        )
        self.encoder_cache_hits_total = self._counter(
            "encoder_cache_hits_total",
            "Those that their endpoint is believed to have encoded before.",
            (*labels, "pod"),
        )
        self.encoder_cache_hit_ratio = self._histogram(
            "encoder_cache_hit_ratio",
            "Share of a request's items that its endpoint is believed to have encoded.",
            RATIOS,
            labels[:2],
        )

    def _declare_predictions(self) -> None:
        kinds = (*MODEL_LABELS, "type")
        self.inference_request_metric = self._gauge(
            "inference_request_metric",
            "Latencies of the last request, predicted and measured; 1 for one that was too long.",
            (*PREDICTION, "type"),
            objective("inference_request_metric", kinds),
        )
        self.request_slo_violation_total = self._counter(
            "request_slo_violation_total",
            "Requests that took longer than they asked for.",
            (*PREDICTION, "type"),
            objective("request_slo_violation_total", kinds),
        )
        self.request_predicted_ttft_seconds = self._predicted(
            "request_predicted_ttft_seconds", "Predicted time to the first token.", SECONDS
        )
        self.request_predicted_tpot_seconds = self._predicted(
            "request_predicted_tpot_seconds",
            "Predicted time per token after it.",
            PREDICTED_TPOT_SECONDS,
        )
        text = "Time that the prediction took."
        self.request_ttft_prediction_duration_seconds = self._predicted(
            "request_ttft_prediction_duration_seconds", text, PREDICTION_SECONDS
        )
        self.request_tpot_prediction_duration_seconds = self._predicted(
            "request_tpot_prediction_duration_seconds", text, PREDICTION_SECONDS
        )

    def _decisions(self, name: str) -> Counter:
        return self._counter(
            name,
            "Requests by the stages that got an endpoint of their own.",
            (*PLUGIN, *DECISION),
            (Twin(SCHEDULER_PREFIX + name, DECISION),),
        )

    def _predicted(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(name, text, buckets, PREDICTION, objective(name, MODEL_LABELS))


class RecordingSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.active = self._own_gauge("recording_active", "1 while decisions are recorded.")
        self.bytes_total = self._own_counter("recording_bytes_total", "Written to the recording.")
        self.lost_lines_total = self._own_counter(
            "recording_lost_lines_total", "Lines that could not be written to the recording."
        )


class StreamSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.inflight = self._gauge("extproc_streams_inflight", "ext_proc streams that are open.")
        self.duration_seconds = self._histogram(
            "extproc_stream_duration_seconds", "How long streams were open.", STREAM_SECONDS
        )
        self.total = self._counter(
            "extproc_streams_total", "Streams that ended, by their gRPC status.", ("code",)
        )


VARIANT = ("variant",)


class XdsSeries(Declarations):
    """Declares the family; `declared` collects the series for the page."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self.clients = self._own_gauge("xds_clients", "Streams of endpoint discovery now open.")
        self.responses_total = self._own_counter(
            "xds_responses_total", "Responses to clients of endpoint discovery.", VARIANT
        )
        self.acks_total = self._own_counter(
            "xds_acks_total", "Responses that a client has taken over.", VARIANT
        )
        self.nacks_total = self._own_counter(
            "xds_nacks_total", "Responses that a client has refused.", VARIANT
        )
        self.version = self._own_gauge(
            "xds_version", "How many different sets of endpoints there have been to tell of."
        )
        self.endpoints = self._own_gauge("xds_endpoints", "Endpoints that clients are told of.")
