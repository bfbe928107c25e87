"""The watcher that counts decisions, calls of plugins and outcomes."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

from base.series import Counter, Gauge, Histogram, observe_each
from picker.decisions.decision import Decision, ResponseTimes
from picker.decisions.steps import SCHEDULER
from picker.errors import EVICTED_STATUS, HTTP_STATUS
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import FinishCause, Usage

MODEL_SERVER_ERROR = "ModelServerError"
Labels: TypeAlias = tuple[str, str, str, str]
# The inputs of the labels of its series.
_asked = attrgetter("incoming_model", "target_model", "fairness_id", "priority")
# Members of bodies that constrain the answer: vLLM's, and those it replaced.
_CONSTRAINTS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "structural_tag",
)
_FEATURES = frozenset({"tools", "response_format", "text", "output_config", *_CONSTRAINTS})
_CODES = {status: code.value for code, status in HTTP_STATUS.items()}


class RequestMetrics:
    """Feeds `PickerMetrics`. A refused request appears only in the error counter. Owns the labels
    under which requests count as running, because a later rewrite rule may give other labels to the
    requests after it.
    """

    def __init__(self, metrics: PickerMetrics) -> None:
        self._metrics = metrics
        self._decisions = 0
        self._running: dict[int, Labels] = {}  # by number of the request
        self._routed: dict[Labels, tuple[Counter, Histogram, Gauge, Histogram]] = {}

    @property
    def decisions(self) -> int:
        """Return the number of decisions so far, which shows a drain if more arrive."""
        return self._decisions

    def decided(self, decision: Decision) -> None:
        self._decisions += 1
        metrics, observed = self._metrics, _of_steps(decision)
        labels = metrics.labels.of(*_asked(decision))
        total, size, running, _ = self._routed.get(labels) or self._series(labels)
        total.inc()
        running.inc()
        self._running[decision.number] = labels
        seconds = decision.decision_seconds - decision.queue_seconds
        if decision.rewritten is not None:
            rule, target = decision.rewritten.rule, decision.rewritten.model
            metrics.model_rewrite_decisions_total.labels(rule, labels[0], target).inc()
        if (request := decision.request) is not None:
            payload = request.body.payload
            if payload is not None and not _FEATURES.isdisjoint(payload):
                for feature in _features(payload):
                    metrics.request_features_total.labels(feature).inc()
        durations = (metrics.request_processing_duration_seconds, seconds)
        observe_each([(size, decision.size_bytes), durations, *observed])

    def streamed(self, decision: Decision, gap_seconds: float) -> None:
        labels = self._metrics.labels.of(*_asked(decision))
        self._metrics.request_streaming_itl_seconds.labels(*labels).observe(gap_seconds)

    def finished(self, decision: Decision) -> None:
        metrics, cause, seconds = self._metrics, decision.cause, decision.seconds
        error = _error_code(decision)
        if decision.steps:
            observe_each(_of_steps(decision))
        labels = self._running.pop(decision.number, None)
        if labels is None:
            labels = metrics.labels.of(*_asked(decision))
        if decision.response_status is not None and decision.response_status // 100 == 2:
            metrics.labels.answered(decision.target_model)
        if cause is not None:
            metrics.request_outcomes_total.labels(cause.value).inc()
        if decision.endpoint_key is not None:
            _, _, running, duration = self._routed.get(labels) or self._series(labels)
            running.dec()
            duration.observe(seconds)
        if decision.response is not None:
            self._count_response(labels, decision.response)
        if decision.usage is not None:
            self._count_usage(labels, decision, decision.usage)
        if error is not None:
            metrics.request_error_total.labels(*labels, error).inc()

    def plugin_failed(self, plugin: str) -> None:
        self._metrics.plugin_failures_total.labels(plugin).inc()

    def _series(self, labels: Labels) -> tuple[Counter, Histogram, Gauge, Histogram]:
        metrics = self._metrics
        found = self._routed[labels] = (
            metrics.request_total.labels(*labels),
            metrics.request_size_bytes.labels(*labels),
            metrics.request_running.labels(*labels),
            metrics.request_duration_seconds.labels(*labels),
        )
        return found

    def _count_response(self, labels: Labels, response: ResponseTimes) -> None:
        metrics = self._metrics
        metrics.response_processing_duration_seconds.observe(response.processing_seconds)
        metrics.response_size_bytes.labels(*labels).observe(response.num_bytes)
        if response.ttft_seconds is not None:
            streaming = "true" if response.is_streaming else "false"
            metrics.request_ttft_seconds.labels(*labels, streaming).observe(response.ttft_seconds)

    def _count_usage(self, labels: Labels, decision: Decision, usage: Usage) -> None:
        metrics, seconds = self._metrics, decision.seconds
        if usage.prompt_tokens > 0:
            metrics.request_input_tokens.labels(*labels).observe(usage.prompt_tokens)
        if usage.cached_tokens is not None:
            metrics.request_cached_tokens.labels(*labels).observe(usage.cached_tokens)
        tokens = usage.completion_tokens
        if tokens <= 0:
            return
        metrics.request_output_tokens.labels(*labels).observe(tokens)
        metrics.request_ntpot_seconds.labels(*labels).observe(seconds / tokens)
        response = decision.response
        if tokens == 1 or response is None or response.ttft_seconds is None:
            return
        if response.is_streaming:
            decoding = max(0.0, seconds - response.ttft_seconds)
            each = decoding / (tokens - 1)
            metrics.request_streaming_tpot_seconds.labels(*labels).observe(each)


def _features(payload: Mapping[str, Any]) -> Iterator[str]:
    tools = payload.get("tools")
    if isinstance(tools, list) and tools:
        yield "tools"
    of_responses, of_messages = payload.get("text"), payload.get("output_config")
    formats = (
        payload.get("response_format"),
        of_responses.get("format") if isinstance(of_responses, dict) else None,
        of_messages.get("format") if isinstance(of_messages, dict) else None,
    )
    named = {one.get("type") for one in formats if isinstance(one, dict)}
    if named - {"text"} or any(payload.get(name) is not None for name in _CONSTRAINTS):
        yield "structured_output"


def _of_steps(decision: Decision) -> list[tuple[Histogram | None, float]]:
    """Return the durations of calls and what meters observe; meters also increment counters."""
    observed: list[tuple[Histogram | None, float]] = []
    for step in decision.steps:
        bound = step.bound
        observed.append((bound.durations, step.seconds))
        meter = bound.meter
        if meter is not None and (bound.point == SCHEDULER or not isinstance(step.said, Exception)):
            observed += meter(decision, step) or ()
    return observed


def _error_code(decision: Decision) -> str | None:
    if decision.refusal is not None:
        return decision.refusal.code.value
    if decision.cause is FinishCause.EVICTED:  # regardless of the beginning of the response
        return _CODES[EVICTED_STATUS]
    status = decision.response_status
    if decision.cause is FinishCause.REFUSED:  # by the stream, because it is too large
        return _CODES.get(status or 0)
    if decision.endpoint_key is None:  # the status is the proxy's own
        return None
    return MODEL_SERVER_ERROR if status not in (None, 200) else None
