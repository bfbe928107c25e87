"""Ejections are counted by endpoint and logged, both with limits."""

import logging

import pytest

from picker.metrics.label_caps import MAX_NAMES
from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.detector import ProbeResult
from picker.telemetry.health_metrics import MAX_LINES, WINDOW_SECONDS, HealthMetrics


def page(metrics: PickerMetrics) -> list[str]:
    lines = metrics.render().decode().splitlines()
    return [line for line in lines if line.startswith("pointsman_endpoint")]


def test_ejections_and_returns_are_counted() -> None:
    metrics = PickerMetrics()
    watcher = HealthMetrics(metrics, lambda: 0.0)
    assert 'pointsman_endpoint_probes_total{result="failure"} 0' in "\n".join(page(metrics))
    for _ in range(2):
        watcher.ejected("prod/pod-1", 3, 1.0)
    watcher.probed("prod/pod-1", ProbeResult.FAILURE)
    watcher.counted(1)
    text = "\n".join(page(metrics))
    ejections = 'pointsman_endpoint_ejections_total{endpoint_name="pod-1",namespace="prod"} 2'
    assert ejections in text
    assert 'pointsman_endpoint_probes_total{result="failure"} 1' in text
    assert "pointsman_endpoints_ejected 1" in text


def test_the_names_of_endpoints_are_bounded() -> None:
    metrics = PickerMetrics()
    watcher = HealthMetrics(metrics, lambda: 0.0)
    for number in range(MAX_NAMES + 5):
        watcher.ejected(f"prod/pod-{number}", 3, 1.0)
    ejections = [line for line in page(metrics) if "ejections" in line]
    assert len(ejections) == MAX_NAMES + 1
    assert ejections[-1].endswith('{endpoint_name="other",namespace=""} 5.0')


def test_the_log_says_so_but_not_a_hundred_times(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watcher = HealthMetrics(PickerMetrics(), lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            watcher.ejected("prod/pod-1", 3, 1.0)
            watcher.returned("prod/pod-1")
        assert len(caplog.messages) == MAX_LINES
        now[0] += WINDOW_SECONDS
        watcher.returned("prod/pod-1")
    assert caplog.messages[-2] == "90 more changes of endpoints' health were not logged"
    assert caplog.messages[-1] == "endpoint prod/pod-1 answers well and is used as before"
    assert caplog.messages[0] == (
        "endpoint prod/pod-1 is ejected after 3 failures in a row; tried out in 1.0 s"
    )
