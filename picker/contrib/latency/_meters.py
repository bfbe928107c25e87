"""The meter of a predicted-latency-producer: the predicted and the actual latencies of requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from picker.contrib.latency._objectives import latency_objectives
from picker.contrib.latency._predictor import Measurement
from picker.decisions.decision import Decision
from picker.decisions.steps import PluginStep
from picker.framework.attributes import DataKey, LatencyPrediction
from picker.metrics.picker_metrics import PickerMetrics
from picker.telemetry.meters import found, picked_endpoint
from picker.types import FinishCause


@dataclass(frozen=True, slots=True)
class LatencyPredictions:
    """Observes predictions, actual latencies and missed objectives: after the prediction, when the
    request leaves, and when it ends.
    """

    key: DataKey[Mapping[str, LatencyPrediction]]
    measurement: DataKey[Measurement]
    metrics: PickerMetrics
    labels: tuple[str, str]

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        match step.bound.point:
            case "DataProducer":
                self._predicted(decision, step.seconds)
            case "PreRequest":
                self._left(decision)
            case "ResponseComplete":
                self._ended(decision)

    def _predicted(self, decision: Decision, seconds: float) -> None:
        if found(decision, self.key) is None:
            return
        series, labels = self.metrics.plugins, self._labels(decision)
        series.request_ttft_prediction_duration_seconds.labels(*labels).observe(seconds)
        series.request_tpot_prediction_duration_seconds.labels(*labels).observe(seconds)
        self._set(labels, "ttft_prediction_duration", seconds)
        self._set(labels, "tpot_prediction_duration", seconds)

    def _left(self, decision: Decision) -> None:
        endpoint = picked_endpoint(decision)
        predictions = found(decision, self.key)
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
        request = decision.request
        measured = found(decision, self.measurement)
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
        self._observe(labels, "ttft", ttft, asked.ttft_ms)
        tokens = 0 if decision.usage is None else decision.usage.completion_tokens
        if request.body.stream and tokens > 1 and measured.last is not None:
            tpot = max(0.0, measured.last - first) / (tokens - 1)
            self._observe(labels, "tpot", tpot, asked.tpot_ms)

    def _compare(self, measured: Measurement, labels: tuple[str, ...]) -> None:
        series = self.metrics.plugins
        for one in measured.outcomes:
            error = abs(one.expected_ms - one.seen_ms) / one.seen_ms
            series.request_latency_prediction_error_ratio.labels(*labels, one.kind).observe(error)
            if one.p90_ms is not None:
                held = "true" if one.seen_ms <= one.p90_ms else "false"
                series.request_latency_p90_total.labels(*labels, one.kind, held).inc()

    def _observe(
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
