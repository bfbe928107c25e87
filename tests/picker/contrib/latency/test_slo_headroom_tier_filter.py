"""slo-headroom-tier-filter: those that will meet the objectives, and now and then the others."""

from __future__ import annotations

from random import Random

import pytest

from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from tests.support.picker.plugin_scenes import configured, kept, placed

Headrooms = dict[str, tuple[float, float]]


def predicted(headrooms: Headrooms, producer: str = "predicted-latency-producer") -> Attributes:
    """(TTFT, TPOT) headrooms by endpoint name."""
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
def test_a_tier_is_kept_by_headroom(headrooms: Headrooms, positive: str, negative: str) -> None:
    """Without a prediction: negative. A tier on its own is everybody."""
    candidates = [placed(name) for name in "abc"]
    never = configured("slo-headroom-tier-filter", {"epsilonExploreNeg": 0})
    always = configured("slo-headroom-tier-filter", {"epsilonExploreNeg": 1})
    assert "".join(kept(never, candidates, predicted(headrooms))) == positive
    assert "".join(kept(always, candidates, predicted(headrooms))) == negative


def test_the_negative_tier_is_explored_at_its_rate() -> None:
    """One percent by default."""
    plugin, rng = configured("slo-headroom-tier-filter"), Random(3)
    candidates, attributes = [placed("a"), placed("b")], predicted({"a": (1, 1)})
    answers = [kept(plugin, candidates, attributes, rng=rng) for _ in range(5000)]
    assert 25 < answers.count(["b"]) < 80
    assert answers.count(["a"]) + answers.count(["b"]) == 5000


def test_without_findings_all_are_kept() -> None:
    """Or with findings of another producer."""
    candidates = [placed("a"), placed("b")]
    assert kept(configured("slo-headroom-tier-filter"), candidates) == ["a", "b"]
    mine = configured(
        "slo-headroom-tier-filter",
        {"latencyPredictionInfoProducerName": "mine", "epsilonExploreNeg": 0},
    )
    assert kept(mine, candidates, predicted({"a": (1, 1)})) == ["a", "b"]
    assert kept(mine, candidates, predicted({"a": (1, 1)}, "mine")) == ["a"]
    assert mine.consumes == (latency_predictions_key("mine"),)
