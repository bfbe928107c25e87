"""Numbers of endpoints by name."""

from __future__ import annotations

import math

import pytest

from picker.scheduling.endpoint_attributes import attribute_number, check_attribute
from picker.types import Candidate, Endpoint, EndpointMetrics

ENDPOINT = Endpoint("w", "10.0.0.1", 8000)


@pytest.mark.parametrize(
    ("attribute", "number"),
    [
        ("WaitingQueueSize", 3.0),
        ("RunningRequestsSize", 2.0),
        ("KVCacheUsagePercent", 0.5),
        ("MaxActiveModels", None),
        ("Other", None),
    ],
)
def test_core_metrics_are_known_by_name(attribute: str, number: float | None) -> None:
    """As long as the endpoint's load is known."""
    metrics = EndpointMetrics(3, 2, 0.5)
    producer = "core-metrics-extractor"
    assert attribute_number(Candidate(ENDPOINT, metrics), attribute, producer) == number
    stale = Candidate(ENDPOINT, None, last_metrics=metrics)
    assert attribute_number(stale, attribute, producer) is None


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7.0),
        (0.25, 0.25),
        (True, None),
        ("7", None),
        (math.nan, None),
        (math.inf, None),
        (10**400, None),
    ],
)
def test_findings_of_extractors_count_when_they_are_numbers(
    value: object, number: float | None
) -> None:
    """Under the extractor's own name only."""
    candidate = Candidate(ENDPOINT, attributes={"Util/dcgm-extractor": value})
    assert attribute_number(candidate, "Util", "dcgm-extractor") == number
    assert attribute_number(candidate, "Util", "core-metrics-extractor") is None


def test_a_name_that_looks_like_a_key_needs_its_producer() -> None:
    """`Type/producer` in place of the attribute is a mistake of the configuration."""
    assert check_attribute("Util", "") == "core-metrics-extractor"
    assert check_attribute("llm-d.ai/queue", "mine") == "mine"
    with pytest.raises(ValueError, match="slash"):
        check_attribute("Util/dcgm-extractor", "")
    with pytest.raises(ValueError, match="missing"):
        check_attribute("", "mine")
