"""prefix-cache-affinity-filter: warm endpoints, unless they delay the request."""

from collections.abc import Mapping
from functools import partial
from random import Random

import pytest

from picker.framework.attributes import (
    Attributes,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    inflight_load_key,
    latency_predictions_key,
)
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from tests.support.picker.plugin_scenes import configured, passed, placed

make = partial(configured, "prefix-cache-affinity-filter")

MATCH_KEY = match_info_key("approx-prefix-cache-producer")


def found(
    matches: Mapping[str, int],
    tokens: Mapping[str, int] | None = None,
    ttft_ms: Mapping[str, float] | None = None,
    total: int = 10,
) -> Attributes:
    attributes = Attributes()
    by_key = {f"default/{name}": blocks for name, blocks in matches.items()}
    attributes[MATCH_KEY] = PrefixCacheMatchInfo(total, 64, by_key)
    if tokens is not None:
        loads = {f"default/{name}": EndpointLoad(1, count) for name, count in tokens.items()}
        attributes[inflight_load_key()] = InFlightLoad(loads, {})
    if ttft_ms is not None:
        predicted = {
            f"default/{name}": LatencyPrediction(ms, 0.0, 0.0, 0.0, True)
            for name, ms in ttft_ms.items()
        }
        attributes[latency_predictions_key()] = predicted
    return attributes


# a, b and c.
CANDIDATES = [placed(name) for name in "abc"]


@pytest.mark.parametrize(
    ("matches", "threshold", "expected"),
    [
        ({"a": 8, "b": 7}, None, "a"),
        ({"a": 8, "c": 10}, None, "ac"),
        ({"a": 7, "b": 7}, None, "abc"),
        ({}, None, "abc"),
        ({"b": 10}, 1.0, "b"),
        ({"b": 9}, 1.0, "abc"),
        ({"b": 1}, 0.1, "b"),
        ({"b": 10}, 0.0, "abc"),
        ({"b": 10}, -1.0, "abc"),
        ({"a": 9, "b": 9, "c": 9}, None, "abc"),
    ],
)
def test_endpoints_with_enough_of_the_prompt_pass(
    matches: dict[str, int], threshold: float | None, expected: str
) -> None:
    plugin = make({} if threshold is None else {"affinityThreshold": threshold})
    assert "".join(passed(plugin, CANDIDATES, found(matches))) == expected


def test_without_a_finding_all_pass() -> None:
    plugin = make()
    assert passed(plugin, CANDIDATES) == ["a", "b", "c"]
    assert passed(plugin, CANDIDATES, found({}, total=0)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"a": 18_000}, "a"),
        ({"a": 18_001}, "abc"),
        ({"a": 20_000, "b": 2_000, "c": 9_000}, "a"),
        ({"a": 20_001, "b": 2_000, "c": 9_000}, "abc"),
        ({}, "a"),
    ],
)
def test_stickiness_ends_when_it_costs_too_much_time(tokens: dict[str, int], expected: str) -> None:
    """At 1,000 tokens a second a token takes a millisecond."""
    plugin = make({"peakPrefillThroughput": 1000})
    assert "".join(passed(plugin, CANDIDATES, found({"a": 10}, tokens))) == expected


def test_the_best_sticky_endpoint_decides() -> None:
    plugin = make({"peakPrefillThroughput": 1000})
    warm = found({"a": 10, "b": 10}, {"a": 99_000, "b": 18_000})
    assert passed(plugin, CANDIDATES, warm) == ["a", "b"]


def test_the_default_throughput_is_the_published_one() -> None:
    """The limit is 18 s × 15,928 tokens/s in flight."""
    plugin = make()
    assert passed(plugin, CANDIDATES, found({"a": 10}, {"a": 286_704})) == ["a"]
    assert len(passed(plugin, CANDIDATES, found({"a": 10}, {"a": 286_720}))) == 3


@pytest.mark.parametrize("penalty", [0, -5])
def test_no_penalty_means_always_sticky(penalty: float) -> None:
    plugin = make({"maxTTFTPenaltyMs": penalty})
    assert passed(plugin, CANDIDATES, found({"a": 10}, {"a": 10**12})) == ["a"]
    assert plugin.consumes == (MATCH_KEY,)


@pytest.mark.parametrize(
    ("ttft_ms", "expected"),
    [
        ({"a": 500.0, "b": 400.0, "c": 450.0}, "a"),
        ({"a": 501.0, "b": 400.0, "c": 450.0}, "abc"),
        ({"b": 400.0}, "abc"),
        ({"a": 9e9}, "a"),
        ({}, "a"),
        ({"a": float("nan"), "b": 1.0}, "abc"),
    ],
)
def test_predicted_times_can_decide_instead(ttft_ms: dict[str, float], expected: str) -> None:
    plugin = make({"ttftSource": "latencyPredictor", "maxTTFTPenaltyMs": 100})
    answer = passed(plugin, CANDIDATES, found({"a": 10}, {"a": 10**12}, ttft_ms))
    assert "".join(answer) == expected
    assert plugin.consumes == (MATCH_KEY, latency_predictions_key())


def test_exploration_skips_the_gate_at_its_rate() -> None:
    warm = found({"a": 10})
    always = make({"explorationProbability": 1})
    assert passed(always, CANDIDATES, warm) == ["a", "b", "c"]
    sometimes, rng = (make({"explorationProbability": 0.25}), Random(7))
    explored = sum(len(passed(sometimes, CANDIDATES, warm, rng=rng)) == 3 for _ in range(2000))
    assert 430 < explored < 570
    untouched = Random(7)
    assert passed(always, CANDIDATES[:1], warm, rng=untouched) == ["a"]
    assert passed(make(), CANDIDATES, warm, rng=untouched) == ["a"]
    assert untouched.random() == Random(7).random()


def test_the_producers_are_configurable() -> None:
    names = {
        "prefixMatchInfoProducerName": "precise",
        "inFlightLoadProducerName": "loads",
        "latencyPredictionInfoProducerName": "oracle",
    }
    by_load = make(names)
    assert by_load.consumes == (match_info_key("precise"), inflight_load_key("loads"))
    predicted = make({**names, "ttftSource": "latencyPredictor"})
    assert predicted.consumes == (match_info_key("precise"), latency_predictions_key("oracle"))
    assert make({"affinityThreshold": 0}).consumes == ()
