"""The meters of plugins of certain kinds: what is counted of what they leave behind in a decision.

A meter is called with each step of its plugin, when the request leaves or is over. It reads the
decision, never the plugin. A step that failed is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from picker.decisions.decision import Decision
from picker.decisions.steps import Meter, Observed, PluginStep
from picker.errors import PickerError
from picker.framework.attributes import (
    ENCODER_MATCHES,
    LATENCY_PREDICTIONS,
    DataKey,
    EncoderMatch,
    LatencyPrediction,
)
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY
from picker.framework.interfaces import KvEventConsumer, ProducesData, RevisionGate
from picker.metrics.families import MODALITIES, KvSeries
from picker.metrics.label_caps import OVERFLOW
from picker.metrics.picker_metrics import PickerMetrics
from picker.metrics.series import Counter, Histogram
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.scheduling.latency_objectives import latency_objectives
from picker.scheduling.latency_predictor import Measurement, measurement_key
from picker.tokenization.multimodal import modalities
from picker.types import (
    BYTES_PER_TOKEN,
    Candidate,
    Endpoint,
    FinishCause,
    SchedulingResult,
)

T = TypeVar("T")
PD_HANDLER = "pd-profile-handler"
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Where the best match of each request goes, as a ratio and in bytes.

    `index` counts look-ups of an index that engines fill.
    """

    key: DataKey[PrefixCacheMatchInfo]
    hit_ratio: Histogram
    hit_bytes: Histogram
    index: KvSeries | None = None

    def __call__(self, decision: Decision, step: PluginStep) -> Observed:
        """The match; nothing for a request without prompts."""
        info = _found(decision, self.key)
        if info is None or not info.total_blocks:
            return ()
        best = max(info.match_blocks.values(), default=0)
        if self.index is not None:
            self.index.lookup_requests_total.inc()
            self.index.lookup_hits_total.inc(best)
            self.index.max_pod_hit_count_total.inc(best)
            self.index.lookup_latency_seconds.observe(step.seconds)
        return (
            (self.hit_ratio, best / info.total_blocks),
            (self.hit_bytes, best * info.block_size_tokens * BYTES_PER_TOKEN),
        )


@dataclass(frozen=True, slots=True)
class DisaggregationDecisions:
    """Counts which stages got an endpoint of their own. `labels` are those of the plugin."""

    decisions: Counter
    metrics: PickerMetrics
    labels: tuple[str, str]

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        """Count what the profile handler left."""
        stages = _found(decision, DISAGGREGATION_DECISION_KEY)
        if stages is not None:
            model = self.metrics.labels.model(decision.target_model) or UNKNOWN_MODEL
            self.decisions.labels(*self.labels, model, stages.value).inc()


@dataclass(frozen=True, slots=True)
class EncoderCaches:
    """Counts the multi-modal items of requests, and those that their endpoint has encoded."""

    key: DataKey[EncoderMatch]
    metrics: PickerMetrics
    plugin_name: str
    plugin_type: str

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        """Count the items; nothing for a request without any."""
        request, endpoint = decision.request, _picked(decision)
        match = _found(decision, self.key)
        if match is None or request is None or endpoint is None:
            return
        series, labels = self.metrics.plugins, (self.plugin_type, self.plugin_name)
        found = match.modalities.get(endpoint.key, {})
        asked = modalities(request.features)
        for kind, items in asked.items():
            modality = kind if kind in MODALITIES else OVERFLOW
            series.encoder_cache_queries_total.labels(*labels, modality).inc(items)
            series.encoder_cache_hits_total.labels(*labels, modality, endpoint.name).inc(
                found.get(kind, 0)
            )
        ratio = sum(found.values()) / max(1, sum(asked.values()))
        series.encoder_cache_hit_ratio.labels(*labels).observe(ratio)


@dataclass(frozen=True, slots=True)
class LatencyPredictions:
    """What was predicted for requests, what they saw, and which of them took too long."""

    key: DataKey[Mapping[str, LatencyPrediction]]
    measurement: DataKey[Measurement]
    metrics: PickerMetrics
    labels: tuple[str, str]

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        """After the producer has predicted, when the request leaves, and when it is over."""
        match step.bound.point:
            case "DataProducer":
                self._predicted(decision, step.seconds)
            case "PreRequest":
                self._left(decision)
            case "ResponseComplete":
                self._ended(decision)

    def _predicted(self, decision: Decision, seconds: float) -> None:
        """Observe how long the prediction took, if there is one."""
        if _found(decision, self.key) is None:
            return
        series, labels = self.metrics.plugins, self._labels(decision)
        series.request_ttft_prediction_duration_seconds.labels(*labels).observe(seconds)
        series.request_tpot_prediction_duration_seconds.labels(*labels).observe(seconds)
        self._set(labels, "ttft_prediction_duration", seconds)
        self._set(labels, "tpot_prediction_duration", seconds)

    def _left(self, decision: Decision) -> None:
        """Observe what was predicted at the endpoint that the request goes to."""
        endpoint = _picked(decision)
        predictions = _found(decision, self.key)
        if predictions is None or endpoint is None:
            return
        prediction = predictions.get(endpoint.key)
        if prediction is None:
            return
        series, labels = self.metrics.plugins, self._labels(decision)
        series.request_predicted_ttft_seconds.labels(*labels).observe(prediction.ttft_ms / 1000)
        self._set(labels, "predicted_ttft", prediction.ttft_ms / 1000)
        if prediction.tpot_ms is not None:
            series.request_predicted_tpot_seconds.labels(*labels).observe(prediction.tpot_ms / 1000)
            self._set(labels, "predicted_tpot", prediction.tpot_ms / 1000)

    def _ended(self, decision: Decision) -> None:
        """Observe what a request saw that went well, and hold it against what it asked for."""
        request = decision.request
        measured = _found(decision, self.measurement)
        if measured is None or request is None or measured.failed:
            return
        if decision.cause is not FinishCause.COMPLETED:
            return
        asked, labels = latency_objectives(request.headers), self._labels(decision)
        self._compare(measured, labels)
        first = measured.first if request.body.stream else decision.ended_at_seconds
        if first is None:
            return
        ttft = max(0.0, first - request.received_at_seconds)
        self._judge(labels, "ttft", ttft, asked.ttft_ms)
        tokens = 0 if decision.usage is None else decision.usage.completion_tokens
        if request.body.stream and tokens > 1 and measured.last is not None:
            tpot = max(0.0, measured.last - first) / (tokens - 1)
            self._judge(labels, "tpot", tpot, asked.tpot_ms)

    def _compare(self, measured: Measurement, labels: tuple[str, ...]) -> None:
        """Observe how far the predictions were off, and which p90s held."""
        series = self.metrics.plugins
        for one in measured.outcomes:
            error = abs(one.expected_ms - one.seen_ms) / one.seen_ms
            series.request_latency_prediction_error_ratio.labels(*labels, one.kind).observe(error)
            if one.p90_ms is not None:
                held = "true" if one.seen_ms <= one.p90_ms else "false"
                series.request_latency_p90_total.labels(*labels, one.kind, held).inc()

    def _judge(
        self, labels: tuple[str, ...], kind: str, seconds: float, objective_ms: float | None
    ) -> None:
        self._set(labels, kind, seconds)
        if objective_ms is None:
            return
        is_late = seconds * 1000 > objective_ms
        self._set(labels, f"{kind}_slo_violation", float(is_late))
        if is_late:
            self.metrics.plugins.request_slo_violation_total.labels(*labels, kind).inc()

    def _set(self, labels: tuple[str, ...], kind: str, value: float) -> None:
        self.metrics.plugins.inference_request_metric.labels(*labels, kind).set(value)

    def _labels(self, decision: Decision) -> tuple[str, ...]:
        model, target, _, _ = self.metrics.labels.of(decision.incoming_model, decision.target_model)
        return (*self.labels, model, target)


@dataclass(slots=True)
class StrictSelections:
    """Counts requests whose header selected nothing, and knows what there was to choose from.

    Owns the candidates of the last request, for `shares`.
    """

    gate: RevisionGate
    unmatched: Counter
    labels: tuple[str, str]
    last: Sequence[Candidate] = ()

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        """The screener made `after` of `before`."""
        before, after = step.said
        if after is None:  # it failed
            return
        self.last = before
        if before and not after and decision.request is not None:
            for selector in self.gate.unmatched_selectors(decision.request, before):
                self.unmatched.labels(*self.labels, selector).inc()

    def shares(self) -> Mapping[str, float]:
        """The chance of each revision, as of the last request."""
        return self.gate.revision_shares(self.last)


@dataclass(frozen=True, slots=True)
class SchedulingAttempts:
    """Counts attempts to schedule by outcome and first endpoint."""

    metrics: PickerMetrics

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        """One attempt; what failed by mistake is counted elsewhere."""
        result, name = step.said, decision.target_model
        if isinstance(result, SchedulingResult):
            first = result.endpoints[0]
            model = self.metrics.labels.model(name, first.name)
            labels = ("success", model, first.name, first.namespace, str(first.port))
        elif isinstance(result, PickerError):
            labels = ("failure", self.metrics.labels.model(name), "", "", "")
        else:
            return
        self.metrics.scheduler_attempts_total.labels(*labels).inc()


def meter_of(
    point: str, name: str, type_name: str, plugin: object, metrics: PickerMetrics
) -> Meter | None:
    """What is counted about a plugin at an extension point beyond its durations, if anything, by
    what it is and produces.
    """
    labels, series = (name, type_name), metrics.plugins
    if point == "Screener" and isinstance(plugin, RevisionGate):
        unmatched = series.disaggregatedset_strict_header_no_match_total
        return StrictSelections(plugin, unmatched, (type_name, name))
    if point == "DataProducer" and (matches := _key(plugin, MATCH_INFO)) is not None:
        index = metrics.kv if isinstance(plugin, KvEventConsumer) else None
        ratios = metrics.prefix_indexer_hit_ratio.labels(*labels)
        return PrefixMatches(
            matches, ratios, metrics.prefix_indexer_hit_bytes.labels(*labels), index
        )
    if point == "PreRequest":
        if _key(plugin, DISAGGREGATION_DECISION_KEY.data_type) is not None:
            is_older = type_name == PD_HANDLER
            decisions = series.pd_decision_total if is_older else series.disagg_decision_total
            return DisaggregationDecisions(decisions, metrics, labels)
        if (encoded := _key(plugin, ENCODER_MATCHES)) is not None:
            return EncoderCaches(encoded, metrics, name, type_name)
    if point in ("DataProducer", "PreRequest", "ResponseComplete"):
        key = _key(plugin, LATENCY_PREDICTIONS)
        if key is not None:
            return LatencyPredictions(key, measurement_key(name), metrics, labels)
    return None


def _key(plugin: object, data_type: str) -> DataKey[Any] | None:
    """The key of the finding of this type that the plugin produces, if it does."""
    keys = plugin.produces if isinstance(plugin, ProducesData) else ()
    return next((key for key in keys if key.data_type == data_type), None)


def _found(decision: Decision, key: DataKey[T]) -> T | None:
    return None if decision.attributes is None else decision.attributes.get(key)


def _picked(decision: Decision) -> Endpoint | None:
    """What the primary profile picked."""
    result = decision.result
    profile = None if result is None else result.profiles.get(result.primary_profile)
    return profile.picked[0].candidate.endpoint if profile and profile.picked else None
