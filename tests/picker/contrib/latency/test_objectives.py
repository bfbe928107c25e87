"""Latency objectives in headers."""

import pytest

from picker.contrib.latency._objectives import LatencyObjectives, latency_objectives


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, LatencyObjectives()),
        ({"x-llm-d-slo-ttft-ms": "200"}, LatencyObjectives(200.0)),
        ({"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "1.5"}, LatencyObjectives(200.0, 1.5)),
        ({"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": "300"}, LatencyObjectives(300.0)),
        ({"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": ""}, LatencyObjectives(200.0)),
        ({"x-llm-d-slo-ttft-ms": "soon", "x-llm-d-slo-tpot-ms": "nan"}, LatencyObjectives()),
        ({"x-llm-d-slo-ttft-ms": "-1", "x-llm-d-slo-tpot-ms": "0"}, LatencyObjectives()),
        ({"x-llm-d-slo-ttft-ms": "inf"}, LatencyObjectives()),
    ],
)
def test_an_objective_is_a_positive_number(
    headers: dict[str, str], expected: LatencyObjectives
) -> None:
    objectives = latency_objectives(headers)
    assert objectives == expected
    assert bool(objectives) == (expected != LatencyObjectives())
