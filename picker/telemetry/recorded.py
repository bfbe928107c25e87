"""What is counted about plugins of certain kinds, from what they leave behind in a decision.

A recorder is called by the wrapper around its plugin. It reads findings, never the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from picker.config.instances import Instance
from picker.framework.attributes import (
    ENCODER_MATCHES,
    LATENCY_PREDICTIONS,
    Attributes,
    DataKey,
    EncoderMatch,
    LatencyPrediction,
)
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY
from picker.framework.interfaces import Flight, KvEventConsumer, ProducesData, RevisionGate
from picker.metrics.families import KvSeries
from picker.metrics.picker_metrics import PickerMetrics
from picker.metrics.series import Counter, Histogram
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.scheduling.latency_objectives import latency_objectives
from picker.scheduling.latency_predictor import Measurement, measurement_key
from picker.tokenization.multimodal import modalities
from picker.types import (
    BYTES_PER_TOKEN,
    Candidate,
    FinishCause,
    InferenceRequest,
    SchedulingResult,
    Usage,
)

PD_HANDLER = "pd-profile-handler"
UNKNOWN_MODEL = "unknown"


class FindingRecorder(Protocol):
    """Looks at what a data producer has found."""

    def found(self, request: InferenceRequest, attributes: Attributes, seconds: float) -> None:
        """The producer took so long."""
        ...


class DecisionRecorder(Protocol):
    """Looks at a decision when its plugin has been told of it."""

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """The request is about to leave."""
        ...


class EndRecorder(Protocol):
    """Looks at a request when its plugin has been told of its end."""

    def ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """The request is over."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Where the best match of each request goes, as a ratio and in bytes.

    `index` counts look-ups of an index that engines fill.
    """

    key: DataKey[PrefixCacheMatchInfo]
    hit_ratio: Histogram
    hit_bytes: Histogram
    index: KvSeries | None = None

    def found(self, request: InferenceRequest, attributes: Attributes, seconds: float) -> None:
        """Observe the match; nothing for a request without prompts."""
        info = attributes.get(self.key)
        if info is not None and info.total_blocks:
            best = max(info.match_blocks.values(), default=0)
            self.hit_ratio.observe(best / info.total_blocks)
            self.hit_bytes.observe(best * info.block_size_tokens * BYTES_PER_TOKEN)
            if self.index is not None:
                self.index.lookup_requests_total.inc()
                self.index.lookup_hits_total.inc(best)
                self.index.max_pod_hit_count_total.inc(best)
                self.index.lookup_latency_seconds.observe(seconds)


@dataclass(frozen=True, slots=True)
class DisaggregationDecisions:
    """Counts which stages got an endpoint of their own. `labels` are those of the plugin."""

    decisions: Counter
    metrics: PickerMetrics
    labels: tuple[str, str]

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Count the decision that the profile handler left."""
        decision = attributes.get(DISAGGREGATION_DECISION_KEY)
        if decision is not None:
            model = self.metrics.model_label(request.target_model) or UNKNOWN_MODEL
            self.decisions.labels(*self.labels, model, decision.value).inc()


@dataclass(frozen=True, slots=True)
class EncoderCaches:
    """Counts the multi-modal items of requests, and those that their endpoint has encoded."""

    key: DataKey[EncoderMatch]
    metrics: PickerMetrics
    plugin_name: str
    plugin_type: str

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Count the items; nothing for a request without any."""
        match = attributes.get(self.key)
        profile = result.profiles.get(result.primary_profile)
        if match is None or profile is None or not profile.picked:
            return
        series, labels = self.metrics.plugins, (self.plugin_type, self.plugin_name)
        endpoint = profile.picked[0].candidate.endpoint
        found = match.modalities.get(endpoint.key, {})
        asked = modalities(request.features)
        for kind, items in asked.items():
            modality = series.modality_labels.admit(kind)
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

    def found(self, request: InferenceRequest, attributes: Attributes, seconds: float) -> None:
        """Observe how long the prediction took, if there is one."""
        if attributes.get(self.key) is None:
            return
        series, labels = self.metrics.plugins, self._labels(request)
        series.request_ttft_prediction_duration_seconds.labels(*labels).observe(seconds)
        series.request_tpot_prediction_duration_seconds.labels(*labels).observe(seconds)
        self._tell(labels, "ttft_prediction_duration", seconds)
        self._tell(labels, "tpot_prediction_duration", seconds)

    def decided(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Observe what was predicted at the endpoint that the request goes to."""
        profile = result.profiles.get(result.primary_profile)
        predictions = attributes.get(self.key)
        if predictions is None or profile is None or not profile.picked:
            return
        prediction = predictions.get(profile.picked[0].candidate.key)
        if prediction is None:
            return
        series, labels = self.metrics.plugins, self._labels(request)
        ttft, tpot = prediction.ttft_ms / 1000, prediction.tpot_ms / 1000
        series.request_predicted_ttft_seconds.labels(*labels).observe(ttft)
        series.request_predicted_tpot_seconds.labels(*labels).observe(tpot)
        self._tell(labels, "predicted_ttft", ttft)
        self._tell(labels, "predicted_tpot", tpot)

    def ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """Tell what a request saw that went well, and hold it against what it asked for."""
        measured = flight.attributes.get(self.measurement)
        if measured is None or measured.failed or cause is not FinishCause.COMPLETED:
            return
        request = flight.request
        asked, labels = latency_objectives(request.headers), self._labels(request)
        first = measured.first if request.body.stream else now_seconds
        if first is None:
            return
        ttft = max(0.0, first - request.received_at_seconds)
        self._judge(labels, "ttft", ttft, asked.ttft_ms)
        tokens = 0 if usage is None else usage.completion_tokens
        if request.body.stream and tokens > 1 and measured.last is not None:
            tpot = max(0.0, measured.last - first) / (tokens - 1)
            self._judge(labels, "tpot", tpot, asked.tpot_ms)

    def _judge(
        self, labels: tuple[str, ...], kind: str, seconds: float, objective_ms: float | None
    ) -> None:
        self._tell(labels, kind, seconds)
        if objective_ms is None:
            return
        is_late = seconds * 1000 > objective_ms
        self._tell(labels, f"{kind}_slo_violation", float(is_late))
        if is_late:
            self.metrics.plugins.request_slo_violation_total.labels(*labels, kind).inc()

    def _tell(self, labels: tuple[str, ...], kind: str, value: float) -> None:
        self.metrics.plugins.inference_request_metric.labels(*labels, kind).set(value)

    def _labels(self, request: InferenceRequest) -> tuple[str, ...]:
        model, target, _, _ = self.metrics.request_labels(
            request.incoming_model, request.target_model
        )
        return (*self.labels, model, target)


@dataclass(slots=True)
class StrictSelections:
    """Counts requests whose header selected nobody, and knows what there was to choose from.

    Owns the candidates of the last request, for whoever asks for shares now and then.
    """

    gate: RevisionGate
    nobody: Counter
    labels: tuple[str, str]
    last: Sequence[Candidate] = ()

    def screened(
        self, request: InferenceRequest, before: Sequence[Candidate], after: Sequence[Candidate]
    ) -> None:
        """The screener made `after` of `before`."""
        self.last = before
        if before and not after:
            for selector in self.gate.unmatched_selectors(request, before):
                self.nobody.labels(*self.labels, selector).inc()

    def shares(self) -> Mapping[str, float]:
        """The chance of each revision, as of the last request."""
        return self.gate.revision_shares(self.last)


class Recorders:
    """Knows which plugins have something to be counted, by what they are and produce."""

    def __init__(self, metrics: PickerMetrics) -> None:
        self._metrics = metrics

    def of_findings(self, instance: Instance) -> FindingRecorder | None:
        """For a data producer."""
        matches = _key(instance, MATCH_INFO)
        if matches is not None:
            index = self._metrics.kv if isinstance(instance.plugin, KvEventConsumer) else None
            labels = (instance.name, instance.type_name)
            ratios = self._metrics.prefix_indexer_hit_ratio.labels(*labels)
            return PrefixMatches(
                matches, ratios, self._metrics.prefix_indexer_hit_bytes.labels(*labels), index
            )
        return self._predictions(instance)

    def of_decisions(self, instance: Instance) -> DecisionRecorder | None:
        """For a pre-request hook."""
        if _key(instance, DISAGGREGATION_DECISION_KEY.data_type) is not None:
            series, is_older = self._metrics.plugins, instance.type_name == PD_HANDLER
            decisions = series.pd_decision_total if is_older else series.disagg_decision_total
            labels = (instance.name, instance.type_name)
            return DisaggregationDecisions(decisions, self._metrics, labels)
        matches = _key(instance, ENCODER_MATCHES)
        if matches is not None:
            return EncoderCaches(matches, self._metrics, instance.name, instance.type_name)
        return self._predictions(instance)

    def of_ends(self, instance: Instance) -> EndRecorder | None:
        """For a hook on the end of requests."""
        return self._predictions(instance)

    def of_screening(self, instance: Instance) -> StrictSelections | None:
        """For a screener."""
        if not isinstance(instance.plugin, RevisionGate):
            return None
        nobody = self._metrics.plugins.disaggregatedset_strict_header_no_match_total
        return StrictSelections(instance.plugin, nobody, (instance.type_name, instance.name))

    def _predictions(self, instance: Instance) -> LatencyPredictions | None:
        key = _key(instance, LATENCY_PREDICTIONS)
        if key is None:
            return None
        labels = (instance.name, instance.type_name)
        return LatencyPredictions(key, measurement_key(instance.name), self._metrics, labels)


def _key(instance: Instance, data_type: str) -> DataKey[Any] | None:
    """The key of the finding of this type that the plugin produces, if it does."""
    keys = instance.plugin.produces if isinstance(instance.plugin, ProducesData) else ()
    return next((key for key in keys if key.data_type == data_type), None)
