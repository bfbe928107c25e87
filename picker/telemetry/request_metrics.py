"""Counts decisions and outcomes. The director's observer of the running program."""

from __future__ import annotations

from typing import TypeAlias

from picker.errors import EVICTED_STATUS, HTTP_STATUS
from picker.metrics.picker_metrics import PickerMetrics
from picker.requestcontrol.observer import Decision, Outcome, ResponseTimes
from picker.types import FinishCause, InferenceRequest, Usage

MODEL_SERVER_ERROR = "ModelServerError"
RequestLabelValues: TypeAlias = tuple[str, str, str, str]
_CODES = {status: code.value for code, status in HTTP_STATUS.items()}


class RequestMetrics:
    """A `RequestObserver` that feeds `PickerMetrics`.

    A refused request appears in the error counter only; one that was routed counts as an error when
    the endpoint answered anything but 200. What a response says about tokens is counted once, at
    its end. Owns the labels under which requests count as running: a rewrite that is configured
    meanwhile may change those that others get.
    """

    def __init__(self, metrics: PickerMetrics) -> None:
        self._metrics = metrics
        self._decisions = 0
        self._running: dict[int, RequestLabelValues] = {}  # by number of the request

    @property
    def decisions(self) -> int:
        """Decisions seen so far; tells the drain whether requests still arrive."""
        return self._decisions

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Not counted: the queues tell how much waits."""

    def decided(self, decision: Decision) -> None:
        """Count a routed request."""
        self._decisions += 1
        metrics, request = self._metrics, decision.request
        labels = metrics.request_labels(
            decision.incoming_model,
            decision.target_model,
            request.fairness_id if request else "",
            request.priority if request else 0,
        )
        metrics.request_total.labels(*labels).inc()
        metrics.request_size_bytes.labels(*labels).observe(decision.size_bytes)
        metrics.request_running.labels(*labels).inc()
        self._running[decision.number] = labels
        metrics.request_processing_duration_seconds.observe(
            decision.seconds - decision.queue_seconds
        )
        if decision.rewritten is not None:
            rule, target = decision.rewritten.rule, decision.rewritten.model
            metrics.model_rewrite_decisions_total.labels(rule, labels[0], target).inc()

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Count the time between two pieces of a response."""
        labels = self._metrics.request_labels(
            request.incoming_model, request.target_model, request.fairness_id, request.priority
        )
        self._metrics.request_streaming_itl_seconds.labels(*labels).observe(gap_seconds)

    def finished(self, outcome: Outcome) -> None:
        """Count how a request ended."""
        metrics = self._metrics
        labels = self._running.pop(outcome.number, None) or metrics.request_labels(
            outcome.incoming_model, outcome.target_model, outcome.fairness_id, outcome.priority
        )
        metrics.request_outcomes_total.labels(outcome.cause.value).inc()
        if outcome.endpoint_key is not None:
            metrics.request_running.labels(*labels).dec()
            metrics.request_duration_seconds.labels(*labels).observe(outcome.seconds)
        if outcome.response is not None:
            self._count_response(labels, outcome.response)
        if outcome.usage is not None:
            self._count_usage(labels, outcome, outcome.usage)
        error = _error_code(outcome)
        if error is not None:
            metrics.request_error_total.labels(*labels, error).inc()

    def plugin_failed(self, plugin: str) -> None:
        """Count a plugin that raised by mistake."""
        self._metrics.plugin_failures_total.labels(plugin).inc()

    def _count_response(self, labels: RequestLabelValues, response: ResponseTimes) -> None:
        metrics = self._metrics
        metrics.response_processing_duration_seconds.observe(response.processing_seconds)
        metrics.response_size_bytes.labels(*labels).observe(response.num_bytes)
        if response.ttft_seconds is not None:
            streaming = "true" if response.is_streaming else "false"
            metrics.request_ttft_seconds.labels(*labels, streaming).observe(response.ttft_seconds)

    def _count_usage(self, labels: RequestLabelValues, outcome: Outcome, usage: Usage) -> None:
        metrics = self._metrics
        if usage.prompt_tokens > 0:
            metrics.request_input_tokens.labels(*labels).observe(usage.prompt_tokens)
        if usage.cached_tokens is not None:
            metrics.request_cached_tokens.labels(*labels).observe(usage.cached_tokens)
        tokens = usage.completion_tokens
        if tokens <= 0:
            return
        metrics.request_output_tokens.labels(*labels).observe(tokens)
        metrics.request_ntpot_seconds.labels(*labels).observe(outcome.seconds / tokens)
        response = outcome.response
        if tokens == 1 or response is None or response.ttft_seconds is None:
            return
        if response.is_streaming:
            decoding = max(0.0, outcome.seconds - response.ttft_seconds)
            each = decoding / (tokens - 1)
            metrics.request_streaming_tpot_seconds.labels(*labels).observe(each)


def _error_code(outcome: Outcome) -> str | None:
    """The word for what went wrong; None: nothing did."""
    if outcome.refusal is not None:
        return outcome.refusal.code.value
    if outcome.cause is FinishCause.EVICTED:  # whatever the response had begun with
        return _CODES[EVICTED_STATUS]
    status = outcome.response_status
    if outcome.cause is FinishCause.REFUSED:  # by the stream: too large
        return _CODES.get(status or 0)
    if outcome.endpoint_key is None:  # the status is the proxy's own
        return None
    return MODEL_SERVER_ERROR if status not in (None, 200) else None
