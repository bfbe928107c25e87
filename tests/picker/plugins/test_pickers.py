"""Pickers draw by their formulas, from the given generator."""

from collections import Counter
from collections.abc import Callable
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.interfaces import PickerPlugin
from picker.plugins.pickers import (
    MaxScorePicker,
    PickerParameters,
    PowerOfTwoPicker,
    RandomPicker,
    RoundRobinPicker,
    SoftmaxPicker,
    WeightedRandomPicker,
)
from picker.types import Candidate, Endpoint, ScoredEndpoint
from tests.depth import examples

Make = Callable[[int], PickerPlugin]


def warm(count: int) -> PickerPlugin:
    return SoftmaxPicker(count, temperature=0.5)


def in_turn(count: int) -> PickerPlugin:
    return RoundRobinPicker(PickerParameters(count))


ALL: list[Make] = [MaxScorePicker, RandomPicker, WeightedRandomPicker, PowerOfTwoPicker, warm]


def scored(*scores: float) -> list[ScoredEndpoint]:
    return [
        ScoredEndpoint(Candidate(Endpoint(f"w{i}", "10.0.0.1", 8000 + i)), score)
        for i, score in enumerate(scores)
    ]


def picks(make: Make, count: int, *scores: float, seed: int = 1) -> list[str]:
    return names(make(count).pick(scored(*scores), Random(seed)))


def names(picked: object) -> list[str]:
    return [one.candidate.endpoint.name for one in picked]  # type: ignore[attr-defined]


def first_picks(make: Make, scores: list[float], count: int = 1) -> Counter[str]:
    picker, rng = make(count), Random(7)
    return Counter(names(picker.pick(scored(*scores), rng))[0] for _ in range(4000))


@pytest.mark.parametrize("make", [*ALL, in_turn])
@examples(40)
@given(
    scores=st.lists(st.floats(-1, 10), min_size=1, max_size=8),
    count=st.integers(-1, 10),
    seed=st.integers(0, 99),
)
def test_every_picker_picks_distinct_endpoints_and_repeats_itself(
    make: Make, scores: list[float], count: int, seed: int
) -> None:
    picked = picks(make, count, *scores, seed=seed)
    assert len(picked) == len(set(picked)) == min(max(1, count), len(scores))
    assert picks(make, count, *scores, seed=seed) == picked


@pytest.mark.parametrize("make", [*ALL, in_turn])
def test_an_empty_list_gives_no_pick(make: Make) -> None:
    assert picks(make, 1) == []


def test_max_score_takes_the_best_in_order() -> None:
    assert picks(MaxScorePicker, 1, 1, 5, 3) == ["w1"]
    assert picks(MaxScorePicker, 3, 1, 5, 3, 0) == ["w1", "w2", "w0"]


@pytest.mark.parametrize("count", [1, 2])
def test_max_score_breaks_ties_at_random(count: int) -> None:
    firsts = first_picks(MaxScorePicker, [2.0, 7.0, 7.0, 7.0], count)
    assert set(firsts) == {"w1", "w2", "w3"}
    assert min(firsts.values()) > 4000 / 3 * 0.85


def test_random_ignores_scores() -> None:
    firsts = first_picks(RandomPicker, [0.0, 100.0])
    assert 0.45 < firsts["w0"] / 4000 < 0.55


def test_weighted_random_draws_in_proportion() -> None:
    firsts = first_picks(WeightedRandomPicker, [1.0, 3.0, 0.0])
    assert set(firsts) == {"w0", "w1"}
    assert 0.71 < firsts["w1"] / 4000 < 0.79


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_weighted_random_draws_without_replacement(scale: float) -> None:
    """The pair (i, j) has the probability wi / W · wj / (W − wi)."""
    weights, draws, rng = [1.0, 2.0, 3.0, 4.0], 20_000, Random(11)
    endpoints, total = scored(*(weight * scale for weight in weights)), sum(weights)
    picker = WeightedRandomPicker(2)
    seen = Counter(tuple(names(picker.pick(endpoints, rng))) for _ in range(draws))
    distance = 0.0
    for (i, one), (j, other) in permutations(enumerate(weights), 2):
        expected = draws * one / total * other / (total - one)
        distance += (seen[f"w{i}", f"w{j}"] - expected) ** 2 / expected
    assert distance < 31.3


@pytest.mark.parametrize("make", ALL)
def test_all_orders_of_equal_scores_are_equally_likely(make: Make) -> None:
    draws, rng, endpoints = 12_000, Random(5), scored(-1.0, -1.0, -1.0)
    picker = make(3)
    seen = Counter(tuple(names(picker.pick(endpoints, rng))) for _ in range(draws))
    expected = draws / 6
    assert len(seen) == 6
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 20.5  # 99.9 %


def test_max_score_orders_negative_totals() -> None:
    assert picks(MaxScorePicker, 9, -3, -1, -2) == ["w1", "w2", "w0"]
    assert picks(MaxScorePicker, 1, -3, -1, -2) == ["w1"]


def test_weighted_random_without_any_score_is_uniform() -> None:
    firsts = first_picks(WeightedRandomPicker, [0.0, -1.0])
    assert 0.45 < firsts["w0"] / 4000 < 0.55


def test_weighted_random_fills_a_longer_list_with_the_scoreless() -> None:
    assert picks(WeightedRandomPicker, 3, 0.0, 0.5, seed=3) == ["w1", "w0"]


def loaded(*loads: int) -> list[ScoredEndpoint]:
    return [
        ScoredEndpoint(Candidate(one.candidate.endpoint, None, load), 0.0)
        for one, load in zip(scored(*[0.0] * len(loads)), loads, strict=True)
    ]


@pytest.mark.parametrize("endpoints", [scored(1, 2, 3, 4), loaded(3, 2, 1, 0)])
def test_power_of_two_takes_the_better_one_of_two(endpoints: list[ScoredEndpoint]) -> None:
    """Among four, the best is picked in 3 of the 6 pairs, the next in 2, the third in 1."""
    picker, rng = PowerOfTwoPicker(), Random(3)
    seen = Counter(names(picker.pick(endpoints, rng))[0] for _ in range(6000))
    assert set(seen) == {"w1", "w2", "w3"}
    for name, expected in (("w3", 3000), ("w2", 2000), ("w1", 1000)):
        assert seen[name] == pytest.approx(expected, abs=150)


def test_power_of_two_compares_loads_only_for_equal_scores() -> None:
    busy, idle = loaded(9, 0)
    assert names(PowerOfTwoPicker(2).pick([busy, idle], Random(1))) == ["w1", "w0"]
    better = ScoredEndpoint(busy.candidate, 1.0)
    assert names(PowerOfTwoPicker().pick([better, idle], Random(1))) == ["w0"]


@pytest.mark.parametrize("weight", [1.0, 7.0])
def test_softmax_draws_as_dynamo_does(weight: float) -> None:
    """Scores 0, 1/2 and 1 at temperature 1 are drawn as e^-1, e^-1/2 and 1."""
    picker, rng, draws = SoftmaxPicker(temperature=1.0), Random(4), 20_000
    endpoints = scored(0.0, weight / 2, weight)
    seen = Counter(names(picker.pick(endpoints, rng))[0] for _ in range(draws))
    for name, expected in (("w0", 0.1863), ("w1", 0.3072), ("w2", 0.5065)):
        assert seen[name] / draws == pytest.approx(expected, abs=0.012)


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_softmax_without_temperature_takes_the_best(temperature: float) -> None:
    picker = SoftmaxPicker(2, temperature=temperature)
    assert names(picker.pick(scored(1, 5, 3), Random(1))) == ["w1", "w2"]


@examples(60)
@given(count=st.integers(1, 7), picks=st.integers(1, 40), seed=st.integers(0, 99))
def test_round_robin_is_fair_within_one(count: int, picks: int, seed: int) -> None:
    picker, rng = RoundRobinPicker(PickerParameters()), Random(seed)
    seen = Counter({f"w{index}": 0 for index in range(count)})
    for _ in range(picks):
        endpoints = scored(*(rng.random() for _ in range(count)))
        seen[names(picker.pick(endpoints, rng))[0]] += 1
    assert max(seen.values()) - min(seen.values()) <= 1


def test_round_robin_serves_filtered_pools_and_newcomers() -> None:
    picker, rng = RoundRobinPicker(PickerParameters()), Random(1)
    pool = scored(0, 0, 0, 0)
    halves = [names(picker.pick(pool[:2] if i % 2 else pool[2:], rng))[0] for i in range(8)]
    assert Counter(halves) == dict.fromkeys(("w0", "w1", "w2", "w3"), 2)
    assert [names(picker.pick(pool[:2], rng))[0] for _ in range(4)] == halves[1:8:2]
    assert {names(picker.pick(pool, rng))[0] for _ in range(2)} == {"w2", "w3"}
    picker.endpoint_removed("default/w3")
    assert names(picker.pick(pool, rng)) == ["w3"]


@pytest.mark.parametrize("make", [*ALL, in_turn])
def test_only_endpoints_that_filters_left_are_picked(make: Make) -> None:
    picker, rng, pool = make(2), Random(9), scored(*range(8))
    for _ in range(300):
        left = rng.sample(pool, rng.randint(1, 8))
        assert set(names(picker.pick(left, rng))) <= set(names(left))
