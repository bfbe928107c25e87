"""Every decision and every outcome leaves its mark in the series."""

from __future__ import annotations

import pytest

from picker.admin.request_metrics import RequestMetrics
from picker.errors import Code
from picker.metrics import PickerMetrics
from picker.requestcontrol.observer import Decision, Outcome
from picker.types import FinishCause

LABELS = {"model_name": "m", "target_model_name": "t", "fairness_id": "", "priority": "0"}


def value(metrics: PickerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def outcome(**changes: object) -> Outcome:
    fields = {"endpoint_key": "default/a", "response_status": 200} | changes
    return Outcome("r", "m", "t", FinishCause.COMPLETED, 1.5, **fields)  # type: ignore[arg-type]


def test_a_routed_request_is_counted_and_runs_until_it_ends() -> None:
    """Total, size, running, duration and cause."""
    metrics = PickerMetrics()
    observer = RequestMetrics(metrics)
    observer.decided(Decision("r", "m", "t", "10.0.0.1:8000", 100, 0.001, ()))
    assert value(metrics, "llm_d_epp_request_running", **LABELS) == 1
    observer.finished(outcome())
    assert value(metrics, "llm_d_epp_request_running", **LABELS) == 0
    assert value(metrics, "llm_d_epp_request_total", **LABELS) == 1
    assert value(metrics, "llm_d_epp_request_size_bytes_sum", **LABELS) == 100
    assert value(metrics, "llm_d_epp_request_duration_seconds_sum", **LABELS) == 1.5
    assert value(metrics, "pointsman_request_outcomes_total", cause="completed") == 1
    assert observer.decisions == 1


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (
            outcome(endpoint_key=None, response_status=429, refusal=Code.RESOURCE_EXHAUSTED),
            "ResourceExhausted",
        ),
        (outcome(response_status=500), "ModelServerError"),
        (outcome(response_status=200), None),
        (outcome(response_status=None), None),
    ],
)
def test_refusals_and_failed_answers_are_errors(end: Outcome, code: str | None) -> None:
    """By the error's word; a refused request never ran."""
    metrics = PickerMetrics()
    RequestMetrics(metrics).finished(end)
    counted = {
        sample.labels["error_code"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "llm_d_epp_request_error_total"
    }
    assert counted == ({} if code is None else {code: 1.0})


def test_a_failed_plugin_is_counted() -> None:
    """By its class."""
    metrics = PickerMetrics()
    RequestMetrics(metrics).plugin_failed("TokenProducer")
    assert value(metrics, "pointsman_plugin_failures_total", plugin="TokenProducer") == 1
