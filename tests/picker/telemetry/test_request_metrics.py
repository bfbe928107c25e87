"""Every decision and every outcome leaves its mark in the series."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from picker.decisions.decision import Decision, ResponseTimes
from picker.errors import Code, RefusedError
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.policies import Rewritten
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Api, FinishCause, InferenceRequest, ParsedBody, Usage

LABELS = {"model_name": "m", "target_model_name": "t", "fairness_id": "f", "priority": "2"}


def page(metrics: PickerMetrics) -> dict[str, float]:
    return {
        sample.name.removeprefix("llm_d_epp_"): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.value
        and sample.name.startswith("llm_d_epp_")
        and not sample.name.endswith("_bucket")
        and {k: v for k, v in sample.labels.items() if k in LABELS} in ({}, LABELS)
    }


def decision(number: int = 0, **changes: Any) -> Decision:
    known = {
        "incoming_model": "m",
        "target_model": "t",
        "fairness_id": "f",
        "priority": 2,
        "size_bytes": 100,
        "endpoint_key": "default/a",
        "decision_seconds": 0.001,
        "ended_at_seconds": 1.5,
        "seconds": 1.5,
    }
    return Decision(number, 0.0, **(known | changes))  # type: ignore[arg-type]


def outcome(cause: FinishCause = FinishCause.COMPLETED, **changes: Any) -> Decision:
    return decision(**({"cause": cause, "response_status": 200} | changes))


def knowing_metrics() -> PickerMetrics:
    metrics = PickerMetrics()
    metrics.labels.pin_rewrites([("m", "t")])
    return metrics


def value(metrics: PickerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_routed_request_is_counted_and_runs_until_it_ends() -> None:
    metrics = knowing_metrics()
    observer = RequestMetrics(metrics)
    observer.decided(decision())
    assert page(metrics) == {
        "request_total": 1,
        "request_running": 1,
        "request_size_bytes_count": 1,
        "request_size_bytes_sum": 100,
        "request_processing_duration_seconds_count": 1,
        "request_processing_duration_seconds_sum": 0.001,
    }
    observer.finished(outcome())
    after = page(metrics)
    assert "request_running" not in after
    assert after["request_duration_seconds_sum"] == 1.5
    assert not [name for name in after if "tokens" in name or name.startswith("response")]
    assert value(metrics, "pointsman_request_outcomes_total", cause="completed") == 1
    assert observer.decisions == 1


def test_a_streamed_response_is_measured_in_every_way() -> None:
    """TPOT divides the remaining time by the remaining tokens, NTPOT all by all."""
    metrics = knowing_metrics()
    observer = RequestMetrics(metrics)
    observer.streamed(decision(), 0.02)
    times = ResponseTimes(True, num_bytes=400, ttft_seconds=0.5, processing_seconds=0.003)
    observer.finished(outcome(usage=Usage(7, 11, 18, 3), response=times))
    seen = page(metrics)
    expected = {
        "response_size_bytes": 400,
        "response_processing_duration_seconds": 0.003,
        "request_ttft_seconds": 0.5,
        "request_input_tokens": 7,
        "request_output_tokens": 11,
        "request_cached_tokens": 3,
        "request_ntpot_seconds": 1.5 / 11,
        "request_streaming_tpot_seconds": 0.1,
        "request_streaming_itl_seconds": 0.02,
    }
    assert {name: seen[f"{name}_sum"] for name in expected} == pytest.approx(expected)
    assert all(seen[f"{name}_count"] == 1 for name in expected)
    streaming = {**LABELS, "streaming": "true"}
    assert value(metrics, "llm_d_epp_request_ttft_seconds_count", **streaming) == 1


@pytest.mark.parametrize(
    ("usage", "is_streaming", "counted"),
    [
        (Usage(0, 5), True, {"request_output_tokens", "request_ntpot_seconds"}),
        (Usage(7, 0), True, {"request_input_tokens"}),
        (Usage(7, 0, 7, 0), True, {"request_input_tokens", "request_cached_tokens"}),
        (Usage(0, 1), True, {"request_output_tokens", "request_ntpot_seconds"}),
        (Usage(0, 5), False, {"request_output_tokens", "request_ntpot_seconds"}),
    ],
)
def test_only_what_was_said_is_counted(usage: Usage, is_streaming: bool, counted: set[str]) -> None:
    metrics = knowing_metrics()
    ttft = 0.5 if usage.completion_tokens == 1 else None
    times = ResponseTimes(is_streaming, 10, ttft_seconds=ttft)
    RequestMetrics(metrics).finished(outcome(usage=usage, response=times))
    names = {
        name.removesuffix("_count")
        for name in page(metrics)
        if name.endswith("_count") and ("tokens" in name or "pot" in name)
    }
    assert names == counted


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (
            outcome(
                endpoint_key=None,
                response_status=429,
                refusal=RefusedError(Code.RESOURCE_EXHAUSTED, "full"),
            ),
            "ResourceExhausted",
        ),
        (outcome(FinishCause.REFUSED, endpoint_key=None, response_status=413), "PayloadTooLarge"),
        (outcome(FinishCause.EVICTED, response_status=429), "ResourceExhausted"),
        (outcome(FinishCause.EVICTED, response_status=200), "ResourceExhausted"),
        (outcome(FinishCause.EVICTED, response_status=500), "ResourceExhausted"),
        (outcome(FinishCause.REFUSED, endpoint_key=None, response_status=None), None),
        (outcome(FinishCause.SKIPPED, endpoint_key=None, response_status=401), None),
        (outcome(FinishCause.CLIENT_GONE, endpoint_key=None, response_status=408), None),
        (outcome(response_status=500), "ModelServerError"),
        (outcome(response_status=200), None),
        (outcome(response_status=None), None),
    ],
)
def test_refusals_and_failed_answers_are_errors(end: Decision, code: str | None) -> None:
    metrics = knowing_metrics()
    RequestMetrics(metrics).finished(end)
    counted = {
        sample.labels["error_code"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "llm_d_epp_request_error_total"
    }
    assert counted == ({} if code is None else {code: 1.0})


def test_a_request_without_a_body_has_empty_labels() -> None:
    metrics = knowing_metrics()
    RequestMetrics(metrics).decided(Decision(0, 0.0))
    empty = dict.fromkeys(LABELS, "") | {"priority": "0"}
    assert value(metrics, "llm_d_epp_request_total", **empty) == 1


def test_a_rewrite_is_counted_by_its_rule() -> None:
    metrics = knowing_metrics()
    RequestMetrics(metrics).decided(decision(rewritten=Rewritten("t", "canary")))
    name = "llm_d_epp_model_rewrite_decisions_total"
    labels = {"model_rewrite_name": "canary", "model_name": "m", "target_model": "t"}
    assert value(metrics, name, **labels) == 1


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("payload", "features"),
    [
        ({"tools": [{"type": "function"}]}, {"tools"}),
        ({"tools": []}, set()),
        ({"response_format": JSON_SCHEMA}, {"structured_output"}),
        ({"response_format": {"type": "text"}}, set()),
        ({"response_format": None, "guided_regex": None}, set()),
        ({"guided_choice": ["a", "b"]}, {"structured_output"}),
        ({"structured_outputs": {"regex": "a+"}, "tools": [{}]}, {"structured_output", "tools"}),
        ({"text": {"format": JSON_SCHEMA}}, {"structured_output"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, set()),
        ({"output_config": {"format": {"type": "json_schema"}}}, {"structured_output"}),
        ({"tools": 7, "text": "hello", "output_config": [], "response_format": "odd"}, set()),
    ],
)
def test_tools_and_forms_of_answers_are_counted(payload: Any, features: set[str]) -> None:
    metrics = knowing_metrics()
    body = ParsedBody(Api.CHAT_COMPLETIONS, "m", payload={"model": "m", **payload})
    made = decision()
    made.request = InferenceRequest("r", {}, body, "m", "m")
    RequestMetrics(metrics).decided(made)
    counted = {labels[0]: count for labels, count in metrics.request_features_total.numbers()}
    assert counted == dict.fromkeys(features, 1)


def test_a_failed_plugin_is_counted() -> None:
    metrics = PickerMetrics()
    RequestMetrics(metrics).plugin_failed("TokenProducer")
    assert value(metrics, "pointsman_plugin_failures_total", plugin="TokenProducer") == 1


def test_a_model_that_is_configured_meanwhile_leaves_no_gauge_behind() -> None:
    metrics = PickerMetrics()
    observer = RequestMetrics(metrics)
    for number in (1, 2):
        observer.decided(decision(number))
        metrics.labels.pin_rewrites([("m", "t")])
    series = metrics.request_running
    assert {labels[0]: count for labels, count in series.numbers()} == {"other": 1, "m": 1}
    for number in (1, 2):
        observer.finished(outcome(number=number))
    assert {labels[0]: count for labels, count in series.numbers()} == {"other": 0, "m": 0}


@pytest.mark.parametrize(("status", "label"), [(200, "alias"), (201, "alias"), (404, "other")])
def test_a_model_is_known_once_a_worker_has_answered_for_it(status: int, label: str) -> None:
    """Workers do not name every model that they serve."""
    metrics = PickerMetrics()
    observer = RequestMetrics(metrics)
    named = {"incoming_model": "alias", "target_model": "alias"}
    for number in (1, 2):
        observer.decided(decision(number, **named))
        observer.finished(outcome(number=number, **(named | {"response_status": status})))
    counted = [labels[0] for labels, _ in metrics.request_total.numbers()]
    assert counted == (["other", "alias"] if label == "alias" else ["other"])
    assert {number for _, number in metrics.request_running.numbers()} == {0}
