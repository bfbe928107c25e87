"""Scores by predicted headroom and by predicted cost."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from picker.contrib.latency.scorers import (
    LatencyCostScorer,
    LatencyCostScorerParameters,
    LatencyScorer,
    LatencyScorerParameters,
)
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from tests.support.picker.plugin_scenes import candidate, request_for


def _scorer(**parameters: Any) -> LatencyScorer:
    return LatencyScorer(msgspec.convert(parameters, LatencyScorerParameters))


def _found(headrooms: Mapping[str, tuple[float, float]], dispatched: int = 1) -> Attributes:
    attributes = Attributes()
    predictions = {
        f"default/{name}": LatencyPrediction(1.0, 1.0, ttft, tpot, True, dispatched)
        for name, (ttft, tpot) in headrooms.items()
    }
    attributes[latency_predictions_key()] = predictions
    return attributes


def score(
    scorer: LatencyScorer, headrooms: Mapping[str, tuple[float, float]], dispatched: int = 1
) -> list[float]:
    candidates = [candidate(name) for name in sorted(headrooms)]
    return list(scorer.score(request_for(), candidates, _found(headrooms, dispatched)))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [1.0, 0.61, 0.01]),
        ({"headroomSelectionStrategy": "most"}, [0.01, 0.41, 1.0]),
        ({"ttftWeight": 0, "tpotWeight": 0.5}, [1.0, 1.0, 0.01]),
    ],
)
def test_positive_endpoints_are_rated_by_the_strategy(
    parameters: dict[str, Any], expected: list[float]
) -> None:
    """c = 0.8 · n_ttft + 0.2 · n_tpot, in steps of a hundredth."""
    headrooms = {"a": (0.0, 0.0), "b": (50.0, 0.0), "c": (100.0, 10.0)}
    assert score(_scorer(**parameters), headrooms) == pytest.approx(expected)


def test_a_dimension_without_a_range_has_no_weight() -> None:
    scorer = _scorer()
    assert score(scorer, {"a": (5.0, 1.0), "b": (5.0, 2.0)}) == [1.0, 0.01]
    assert score(scorer, {"a": (1.0, 5.0), "b": (2.0, 5.0)}) == [1.0, 0.01]
    assert score(scorer, {"a": (5.0, 5.0), "b": (5.0, 5.0)}) == [0.51, 0.51]
    assert score(scorer, {"a": (5.0, 5.0)}) == [0.51]


def test_positive_endpoints_exclude_negative_ones() -> None:
    headrooms = {"a": (-1.0, 5.0), "b": (5.0, 5.0), "c": (5.0, -1.0)}
    assert score(_scorer(), headrooms) == [0.0, 0.51, 0.0]


def test_idle_endpoints_are_rated_first_among_negative_ones() -> None:
    found = _found({"a": (-10.0, 5.0), "b": (-20.0, -5.0), "c": (5.0, -5.0)}, dispatched=0)
    candidates = [candidate("a"), candidate("b"), candidate("c", inflight=1)]
    scores = _scorer().score(request_for(), candidates, found)
    assert list(scores) == [1.0, 0.01, 0.0]


@pytest.mark.parametrize(
    ("headrooms", "expected"),
    [
        ({"a": (5.0, -1.0), "b": (-5.0, 1.0), "c": (-5.0, -1.0)}, [0.51, 0.0, 0.0]),
        ({"a": (-5.0, 1.0), "b": (-5.0, -1.0)}, [0.51, 0.0]),
        ({"a": (-5.0, -1.0), "b": (-9.0, -9.0)}, [1.0, 0.01]),
    ],
)
def test_the_least_bad_group_of_busy_negative_endpoints_is_rated(
    headrooms: dict[str, tuple[float, float]], expected: list[float]
) -> None:
    assert score(_scorer(headroomSelectionStrategy="most"), headrooms) == expected


def test_an_endpoint_without_a_prediction_has_the_mean_of_the_others() -> None:
    candidates = [*(candidate(name) for name in "abcd"), candidate("e", known=False)]
    found = _found({"a": (5.0, 5.0), "b": (float("nan"), 5.0), "d": (-5.0, 5.0)})
    scores = _scorer().score(request_for(), candidates, found)
    assert list(scores) == pytest.approx([0.51, 0.255, 0.255, 0.0, 0.0])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [0.83, 0.08, 0.33]),
        ({"compositeKVWeight": 0, "compositePrefixWeight": 0}, [1.0, 0.0, 0.0]),
        ({"compositeKVWeight": 0, "compositeQueueWeight": 0}, [1.0, 0.0, 1.0]),
        (
            {"compositeKVWeight": 0, "compositeQueueWeight": 0, "compositePrefixWeight": 0},
            [0.5, 0.25, 0.0],
        ),
    ],
)
def test_without_predictions_load_and_cache_decide(
    parameters: dict[str, Any], expected: list[float]
) -> None:
    attributes = Attributes()
    match = PrefixCacheMatchInfo(4, 64, {"default/a": 4, "default/c": 4})
    attributes[match_info_key("approx-prefix-cache-producer")] = match
    candidates = [
        candidate("a", kv_cache_usage=0.5),
        candidate("b", kv_cache_usage=0.75, waiting_requests=4),
        candidate("c", known=False),
    ]
    scores = _scorer(**parameters).score(request_for(), candidates, attributes)
    assert list(scores) == expected


def test_without_predictions_a_missing_signal_is_the_mean_of_the_others() -> None:
    candidates = [
        candidate("a", kv_cache_usage=0.2, waiting_requests=None),
        candidate("b", kv_cache_usage=0.6, waiting_requests=0),
        candidate("c", kv_cache_usage=None, waiting_requests=4),
    ]
    scorer = _scorer(compositePrefixWeight=0)
    scores = scorer.score(request_for(), candidates, Attributes())
    assert list(scores) == pytest.approx([0.65, 0.7, 0.3])


def test_without_findings_queues_are_equal() -> None:
    candidates = [candidate("a"), candidate("b")]
    assert list(_scorer().score(request_for(), candidates, Attributes())) == [0.67, 0.67]


def _scores(
    costs: Mapping[str, float | None], *, producer: str = "learned", known: str = "abc"
) -> list[float]:
    attributes = Attributes()
    predictions = {
        f"default/{name}": LatencyPrediction(1.0, 1.0, 0.0, 0.0, True, cost_ms=cost)
        for name, cost in costs.items()
    }
    attributes[latency_predictions_key("learned")] = predictions
    scorer = LatencyCostScorer(LatencyCostScorerParameters(producer))
    candidates = [candidate(name, known=name in known) for name in "abc"]
    return list(scorer.score(request_for(), candidates, attributes))


def test_scores_are_in_proportion_to_the_least_cost() -> None:
    assert _scores({"a": 400.0, "b": 200.0, "c": 1000.0}) == [0.5, 1.0, 0.2]


def test_an_endpoint_without_a_cost_has_the_mean_of_the_others() -> None:
    assert _scores({"a": 400.0, "b": 800.0}) == [1.0, 0.5, 0.75]
    assert _scores({"a": 400.0, "b": 800.0, "c": None}) == [1.0, 0.5, 0.75]
    assert _scores({"a": 400.0, "b": 800.0}, known="ab") == [1.0, 0.5, 0.0]


def test_endpoints_without_any_cost_score_nothing() -> None:
    assert _scores({"a": None}) == [0.0, 0.0, 0.0]
    assert _scores({"a": 400.0}, producer="another") == [0.0, 0.0, 0.0]
