"""Numbers of endpoints by their names, and the filter that compares them."""

import math
from functools import partial
from typing import Any

import pytest

from picker.plugins.endpoint_attribute import attribute_number, check_attribute
from picker.types import Candidate, Endpoint, EndpointMetrics
from tests.support.picker.plugin_scenes import configured, passed, placed

make = partial(configured, "endpoint-attribute-filter")

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
    candidate = Candidate(ENDPOINT, attributes={"Util/my-extractor": value})
    assert attribute_number(candidate, "Util", "my-extractor") == number
    assert attribute_number(candidate, "Util", "core-metrics-extractor") is None


def test_a_name_that_looks_like_a_key_needs_its_producer() -> None:
    assert check_attribute("Util", "") == "core-metrics-extractor"
    assert check_attribute("llm-d.ai/queue", "mine") == "mine"
    with pytest.raises(ValueError, match="slash"):
        check_attribute("Util/my-extractor", "")
    with pytest.raises(ValueError, match="missing"):
        check_attribute("", "mine")


def threshold(operator: str = "LessThan", value: float = 0.5, **more: Any) -> dict[str, Any]:
    algorithm = {"type": "threshold", "threshold": {"operator": operator, "value": value}}
    return {"attribute": "gpu", "producer": "dcgm", "algorithm": algorithm, **more}


@pytest.fixture
def candidates() -> list[Candidate]:
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
    assert passed(make(threshold(operator)), candidates) == [*expected, "none"]
    strict = make(threshold(operator, onMissing="Fail"))
    assert passed(strict, candidates) == expected


def test_all_pass_instead_of_none_with_the_fallback(candidates: list[Candidate]) -> None:
    none = threshold("LessThan", -1, onMissing="Fail")
    assert passed(make(none), candidates) == []
    fallback = make({**none, "fallbackOnEmpty": True})
    assert passed(fallback, candidates) == ["low", "mid", "high", "none"]
    assert passed(fallback, []) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "0.1", None, [0.1], object()])
def test_another_value_than_a_number_is_missing(value: object) -> None:
    odd = [placed("odd", attributes={"gpu/dcgm": value})]
    assert passed(make(threshold("LessThan", 9, onMissing="Fail")), odd) == []
    assert passed(make(threshold("LessThan", -9)), odd) == ["odd"]


def test_the_filter_reads_core_metrics_by_default() -> None:
    parameters = {**threshold("LessThan", 5, onMissing="Fail"), "attribute": "WaitingQueueSize"}
    del parameters["producer"]
    candidates = [
        placed("short", metrics=EndpointMetrics(waiting_requests=4)),
        placed("long", metrics=EndpointMetrics(waiting_requests=5)),
        placed("unknown", metrics=None),
    ]
    assert passed(make(parameters), candidates) == ["short"]


def test_an_attribute_may_have_a_slash_if_its_producer_is_named() -> None:
    plugin = make({**threshold(onMissing="Fail"), "attribute": "a/b"})
    assert passed(plugin, [placed("w", attributes={"a/b/dcgm": 0.1})]) == ["w"]
