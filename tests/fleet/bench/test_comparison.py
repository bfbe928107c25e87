"""Intervals of ratios, on turns whose ratio is known."""

from dataclasses import replace
from random import Random

import pytest

from fleet.bench.comparison import compare, comparison_lines
from fleet.bench.summary import ClientLoad, Spread, Summary

NOTHING = ClientLoad(1, 0.0, 0.0, 0.0, 0.0)


def turn(name: str, ttft: float) -> Summary:
    spread = Spread(9, ttft, ttft, ttft, ttft, ttft)
    tokens = (1000, 0, 80, 8.0)
    return Summary(
        name, 9, 10.0, 0.9, 0.9, {}, spread, None, spread, *tokens, 3, None, None, (), NOTHING
    )


def turns(ratio: float, rounds: int, seed: int = 1) -> list[Summary]:
    """The rounds differ fivefold, their two turns by `ratio` and a tenth of noise."""
    rng, found = Random(seed), []
    for number in range(1, rounds + 1):
        level = rng.uniform(0.1, 0.5)
        found.append(turn(f"A{number}", level))
        found.append(turn(f"B{number}", level * ratio * rng.lognormvariate(0, 0.1)))
    return found


def test_an_interval_has_the_true_ratio_as_often_as_it_says() -> None:
    """With ten rounds the 95 % of the bootstrap are some 90."""
    hits = 0
    for seed in range(100):
        one = compare(turns(0.7, 10, seed), 1).ratios["TTFT p50 ms"]
        assert one.ratio == pytest.approx(0.7, rel=0.15)
        hits += one.low <= 0.7 <= one.high
    assert hits >= 82


def test_differences_between_rounds_do_not_widen_the_interval() -> None:
    one = compare(turns(0.7, 10), 1).ratios["TTFT p50 ms"]
    assert one.high - one.low < 0.2
    assert (one.rounds, one.second < one.first) == (10, True)


def test_numbers_that_not_every_round_has_are_left_out() -> None:
    seen = turns(0.5, 3)[:-1]
    ratios = compare(seen, 1).ratios
    assert ratios["TTFT p50 ms"].rounds == 2
    assert "ITL p50 ms" not in ratios
    seen[0] = replace(seen[0], ttft=None)
    assert "TTFT p50 ms" not in compare(seen, 1).ratios


def test_few_rounds_are_reported() -> None:
    text = "\n".join(comparison_lines(compare(turns(0.5, 3), 1), "http://a", "http://b"))
    assert "A http://a" in text
    assert "3 rounds: too few" in text
    single = compare(turns(0.5, 1), 1)
    text = "\n".join(comparison_lines(single, "a", "b"))
    assert "1 round has no interval: that takes --rounds 2, and 5 to be trusted" in text
    assert ("95 %" in text, " to 0." in text) == (False, False)
    one = single.ratios["TTFT p50 ms"]
    assert (one.ratio, one.low, one.high) == (pytest.approx(0.5, rel=0.5), None, None)
    assert "needs both of its turns" in "\n".join(comparison_lines(compare([], 1), "a", "b"))
