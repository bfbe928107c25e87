"""Numbers of endpoints by their names, and the filter that compares them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from picker.plugins.endpoint_attribute import attribute_number, check_attribute
from picker.types import Candidate, Endpoint, EndpointMetrics
from tests.support.picker.plugin_scenes import configured, kept, placed

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


def threshold(operator: str = "LessThan", value: float = 0.5, **more: Any) -> dict[str, Any]:
    """Parameters for the attribute `gpu` of the producer `dcgm`."""
    algorithm = {"type": "threshold", "threshold": {"operator": operator, "value": value}}
    return {"attribute": "gpu", "producer": "dcgm", "algorithm": algorithm, **more}


@pytest.fixture
def candidates() -> list[Candidate]:
    """With the numbers 0.2, 0.5 and 0.8, and one without."""
    numbers = {"low": 0.2, "mid": 0.5, "high": 0.8}
    known = [placed(name, attributes={"gpu/dcgm": value}) for name, value in numbers.items()]
    return [*known, placed("none")]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("LessThan", ["low"]),
        ("LessThanOrEqual", ["low", "mid"]),
        ("GreaterThan", ["high"]),
        ("GreaterThanOrEqual", ["mid", "high"]),
        ("Equal", ["mid"]),
        ("NotEqual", ["low", "high"]),
    ],
)
def test_each_operator_compares_the_number_with_the_value(
    candidates: list[Candidate], operator: str, expected: list[str]
) -> None:
    """The endpoint without the number is kept with Pass, the default, and dropped with Fail."""
    assert kept(configured("endpoint-attribute-filter", threshold(operator)), candidates) == [
        *expected,
        "none",
    ]
    strict = configured("endpoint-attribute-filter", threshold(operator, onMissing="Fail"))
    assert kept(strict, candidates) == expected


def test_all_are_kept_instead_of_none_where_that_is_asked_for(candidates: list[Candidate]) -> None:
    """fallbackOnEmpty is off by default."""
    none = threshold("LessThan", -1, onMissing="Fail")
    assert kept(configured("endpoint-attribute-filter", none), candidates) == []
    fallback = configured("endpoint-attribute-filter", {**none, "fallbackOnEmpty": True})
    assert kept(fallback, candidates) == ["low", "mid", "high", "none"]
    assert kept(fallback, []) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "0.1", None, [0.1], object()])
def test_what_is_no_number_is_missing(value: object) -> None:
    odd = [placed("odd", attributes={"gpu/dcgm": value})]
    assert (
        kept(
            configured("endpoint-attribute-filter", threshold("LessThan", 9, onMissing="Fail")), odd
        )
        == []
    )
    assert kept(configured("endpoint-attribute-filter", threshold("LessThan", -9)), odd) == ["odd"]


def test_core_metrics_are_known_by_name_while_the_load_is_known() -> None:
    """The producer is the core metrics extractor unless another is named."""
    parameters = {**threshold("LessThan", 5, onMissing="Fail"), "attribute": "WaitingQueueSize"}
    del parameters["producer"]
    candidates = [
        placed("short", metrics=EndpointMetrics(waiting_requests=4)),
        placed("long", metrics=EndpointMetrics(waiting_requests=5)),
        placed("unknown", metrics=None),
    ]
    assert kept(configured("endpoint-attribute-filter", parameters), candidates) == ["short"]


def test_a_slash_is_fine_once_the_producer_is_named() -> None:
    """The key is the attribute, a slash, the producer."""
    plugin = configured(
        "endpoint-attribute-filter", {**threshold(onMissing="Fail"), "attribute": "a/b"}
    )
    assert kept(plugin, [placed("w", attributes={"a/b/dcgm": 0.1})]) == ["w"]
