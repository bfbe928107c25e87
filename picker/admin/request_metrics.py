"""Counts decisions and outcomes. The director's observer of the running program."""

from __future__ import annotations

from picker.metrics import PickerMetrics
from picker.requestcontrol.observer import Decision, Outcome
from picker.types import InferenceRequest

MODEL_SERVER_ERROR = "ModelServerError"


class RequestMetrics:
    """A `RequestObserver` that feeds `PickerMetrics`.

    A refused request appears in the error counter only; one that was routed counts as an error when
    the endpoint answered anything but 200.
    """

    def __init__(self, metrics: PickerMetrics) -> None:
        self._metrics = metrics
        self._decisions = 0

    @property
    def decisions(self) -> int:
        """Decisions seen so far; tells the drain whether requests still arrive."""
        return self._decisions

    def decided(self, decision: Decision) -> None:
        """Count a routed request."""
        self._decisions += 1
        metrics = self._metrics
        labels = metrics.request_labels(decision.incoming_model, decision.target_model)
        metrics.request_total.labels(*labels).inc()
        metrics.request_size_bytes.labels(*labels).observe(decision.size_bytes)
        metrics.request_running.labels(*labels).inc()
        metrics.request_processing_duration_seconds.observe(decision.seconds)

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Not counted yet."""

    def finished(self, outcome: Outcome) -> None:
        """Count how a request ended."""
        metrics = self._metrics
        labels = metrics.request_labels(outcome.incoming_model, outcome.target_model)
        metrics.request_outcomes_total.labels(outcome.cause.value).inc()
        if outcome.endpoint_key is not None:
            metrics.request_running.labels(*labels).dec()
            metrics.request_duration_seconds.labels(*labels).observe(outcome.seconds)
        error = _error_code(outcome)
        if error is not None:
            metrics.request_error_total.labels(*labels, error).inc()

    def plugin_failed(self, plugin: str) -> None:
        """Count a plugin that raised by mistake."""
        self._metrics.plugin_failures_total.labels(plugin).inc()


def _error_code(outcome: Outcome) -> str | None:
    if outcome.refusal is not None:
        return outcome.refusal.value
    if outcome.response_status not in (None, 200):
        return MODEL_SERVER_ERROR
    return None
