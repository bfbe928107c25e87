"""latency-cost-scorer: the least time lost by all requests."""

from __future__ import annotations

from collections.abc import Mapping

from picker.contrib.latency.scorers import (
    LatencyCostScorer,
    LatencyCostScorerParameters,
)
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from tests.support.picker.plugin_scenes import candidate, request_for


def _scores(
    costs: Mapping[str, float | None], *, producer: str = "learned", known: str = "abc"
) -> list[float]:
    """Of the endpoints a, b and c, of which the load of some is `known`."""
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


def test_an_endpoint_that_lacks_a_prediction_alone_has_the_mean_of_the_others() -> None:
    """One whose load is unknown scores nothing."""
    assert _scores({"a": 400.0, "b": 800.0}) == [1.0, 0.5, 0.75]
    assert _scores({"a": 400.0, "b": 800.0, "c": None}) == [1.0, 0.5, 0.75]
    assert _scores({"a": 400.0, "b": 800.0}, known="ab") == [1.0, 0.5, 0.0]


def test_what_is_not_known_scores_nothing() -> None:
    """All of them, while nothing was learned: other scorers decide."""
    assert _scores({"a": None}) == [0.0, 0.0, 0.0]
    assert _scores({"a": 400.0}, producer="another") == [0.0, 0.0, 0.0]
