"""Objectives in headers, and the types that act on them."""

from functools import partial
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.contrib.latency._objectives import LatencyObjectives, latency_objectives
from picker.contrib.latency.slo import LatencySloAdmitter, LatencySloAdmitterParameters
from picker.errors import RefusedError
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from picker.framework.flow import Rank
from tests.support.picker.plugin_scenes import (
    candidate,
    configured,
    passed,
    placed,
    queued,
    request_for,
)

make = partial(configured, "slo-headroom-tier-filter")

OBJECTIVE = {"x-llm-d-slo-ttft-ms": "100"}


def _found(*valid: bool) -> Attributes:
    attributes = Attributes()
    predictions = {
        f"default/{index}": LatencyPrediction(1.0, 1.0, 0.0, 0.0, good)
        for index, good in enumerate(valid)
    }
    attributes[latency_predictions_key()] = predictions
    return attributes


ADMITTER = LatencySloAdmitter(LatencySloAdmitterParameters())
SHEDDABLE = replace(request_for(priority=-1), headers=OBJECTIVE)
BUSY = candidate("0", running_requests=3, kv_cache_usage=0.5)


def test_a_hopeless_request_is_refused() -> None:
    with pytest.raises(RefusedError) as refused:
        ADMITTER.admit(SHEDDABLE, [BUSY], _found(False), Random(0))
    assert refused.value.status == 429
    assert refused.value.headers == (("x-llm-d-request-dropped-reason", "rejected-saturated"),)


def test_one_suitable_endpoint_is_enough() -> None:
    ADMITTER.admit(SHEDDABLE, [BUSY], _found(True), Random(0))
    idle = candidate("1", kv_cache_usage=0.5)
    cold = candidate("1", running_requests=3, kv_cache_usage=0.019)
    for other in (idle, cold):
        ADMITTER.admit(SHEDDABLE, [BUSY, other], _found(False, False), Random(0))


def test_unknown_and_loaded_endpoints_are_neither_idle_nor_cold() -> None:
    for other in (
        candidate("0", known=False),
        candidate("0", running_requests=None, kv_cache_usage=0.5),
        candidate("0", running_requests=3, kv_cache_usage=None),
        candidate("0", inflight=1, kv_cache_usage=0.5),
        candidate("0", running_requests=1, kv_cache_usage=0.02),
    ):
        with pytest.raises(RefusedError):
            ADMITTER.admit(SHEDDABLE, [other], _found(False), Random(0))


def test_other_requests_are_admitted() -> None:
    ADMITTER.admit(replace(SHEDDABLE, priority=0), [BUSY], _found(False), Random(0))
    ADMITTER.admit(replace(SHEDDABLE, headers={}), [BUSY], _found(False), Random(0))
    ADMITTER.admit(SHEDDABLE, [BUSY], Attributes(), Random(0))
    ADMITTER.admit(SHEDDABLE, [BUSY], _found(), Random(0))
    assert ADMITTER.consumes == (latency_predictions_key(),)


Headrooms = dict[str, tuple[float, float]]


def predicted(headrooms: Headrooms, producer: str = "predicted-latency-producer") -> Attributes:
    attributes = Attributes()
    found = {
        f"default/{name}": LatencyPrediction(0.0, 0.0, ttft, tpot, False)
        for name, (ttft, tpot) in headrooms.items()
    }
    attributes[latency_predictions_key(producer)] = found
    return attributes


@pytest.mark.parametrize(
    ("headrooms", "positive", "negative"),
    [
        ({"a": (1, 1), "b": (-1, 1), "c": (1, -1)}, "a", "bc"),
        ({"a": (0, 0), "b": (-0.1, 0), "c": (0, 5)}, "ac", "b"),
        ({"a": (1, 1)}, "a", "bc"),
        ({"a": (1, 1), "b": (1, 1), "c": (1, 1)}, "abc", "abc"),
        ({"a": (-1, 1), "b": (-1, -1)}, "abc", "abc"),
        ({"a": (float("nan"), 1), "b": (1, 1)}, "b", "ac"),
        ({}, "abc", "abc"),
    ],
)
def test_a_tier_passes_by_headroom(headrooms: Headrooms, positive: str, negative: str) -> None:
    candidates = [placed(name) for name in "abc"]
    never = make({"epsilonExploreNeg": 0})
    always = make({"epsilonExploreNeg": 1})
    assert "".join(passed(never, candidates, predicted(headrooms))) == positive
    assert "".join(passed(always, candidates, predicted(headrooms))) == negative


def test_the_negative_tier_is_explored_at_its_rate() -> None:
    plugin, rng = make(), Random(3)
    candidates, attributes = [placed("a"), placed("b")], predicted({"a": (1, 1)})
    answers = [passed(plugin, candidates, attributes, rng=rng) for _ in range(5000)]
    assert 25 < answers.count(["b"]) < 80
    assert answers.count(["a"]) + answers.count(["b"]) == 5000


def test_without_findings_all_pass() -> None:
    candidates = [placed("a"), placed("b")]
    assert passed(make(), candidates) == ["a", "b"]
    mine = make({"latencyPredictionInfoProducerName": "mine", "epsilonExploreNeg": 0})
    assert passed(mine, candidates, predicted({"a": (1, 1)})) == ["a", "b"]
    assert passed(mine, candidates, predicted({"a": (1, 1)}, "mine")) == ["a"]
    assert mine.consumes == (latency_predictions_key("mine"),)


TTFT = "x-llm-d-slo-ttft-ms"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"headers": {TTFT: "250"}, "received_at_seconds": 2.0}, (2.25, 2.0)),
        ({"headers": {"x-slo-ttft-ms": "100"}, "received_at_seconds": 2.0}, (2.1, 2.0)),
        ({"at": 9.0, "received_at_seconds": 2.0}, (inf, 2.0)),
        *(({"headers": {TTFT: text}}, (inf, 0.0)) for text in ("soon", "", "-1", "0", "nan")),
    ],
)
def test_the_request_whose_first_token_is_due_soonest_goes_first(
    item: dict[str, Any], expected: Rank
) -> None:
    assert configured("slo-deadline-ordering-policy").rank(queued(**item)) == expected


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
