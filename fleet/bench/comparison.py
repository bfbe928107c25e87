"""Two endpoints in alternating turns (`A1 B1 B2 A2 …`): the ratio of each number, with an interval.

The two turns of a round have the same arrivals and lengths. Rounds are the units of the bootstrap:
requests of one turn wait for each other, so they are not independent samples.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.bench.slo import METRICS
from fleet.bench.summary import Spread, Summary

_RESAMPLES = 10_000
_ENOUGH = 5  # rounds


@dataclass(frozen=True, slots=True)
class Ratio:
    """The medians of A and B, the geometric mean of B / A, and its interval, if it has one."""

    first: float
    second: float
    ratio: float
    low: float | None
    high: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class TurnComparison:
    """Ratios by name, without those that are missing or zero in some round."""

    ratios: Mapping[str, Ratio]


def _quantile(metric: str, name: str) -> Callable[[Summary], float | None]:
    def value(one: Summary) -> float | None:
        spread: Spread | None = getattr(one, metric)
        return None if spread is None else 1e3 * float(getattr(spread, name))

    return value


_NUMBERS: Mapping[str, Callable[[Summary], float | None]] = {
    **{
        f"{metric.upper()} {name} ms": _quantile(metric, name)
        for metric in METRICS
        for name in ("p50", "p95")
    },
    "requests/s": lambda one: one.completed_rate,
    "output tokens/s": lambda one: one.output_tokens_per_second,
    "cached share": lambda one: one.cached_share,
    "goodput": lambda one: one.goodput,
}


def compare(turns: Sequence[Summary], seed: int) -> TurnComparison:
    """Compare turns by their names; a round that has only one of its two turns is left out."""
    named = {one.name: one for one in turns}
    numbers = [name[1:] for name in named if name[0] == "A" and f"B{name[1:]}" in named]
    found = {}
    for label, of in _NUMBERS.items():
        pairs = [(of(named[f"A{number}"]), of(named[f"B{number}"])) for number in numbers]
        whole = [(a, b) for a, b in pairs if a and b]
        if whole and len(whole) == len(pairs):
            found[label] = _ratio(whole, seed)
    return TurnComparison(found)


def _ratio(pairs: Sequence[tuple[float, float]], seed: int) -> Ratio:
    logs = np.log([b / a for a, b in pairs])
    low = high = None
    if len(logs) > 1:
        rng = np.random.default_rng(seed)
        drawn = logs[rng.integers(0, len(logs), (_RESAMPLES, len(logs)))].mean(axis=1)
        low, high = map(float, np.exp(np.quantile(drawn, (0.025, 0.975))))
    first, second = np.median(np.asarray(pairs), axis=0)
    ratio = math.exp(float(logs.mean()))
    return Ratio(float(first), float(second), ratio, low, high, len(pairs))


def comparison_lines(comparison: TurnComparison, first: str, second: str) -> Iterator[str]:
    yield f"A {first}"
    yield f"B {second}"
    if not comparison.ratios:
        yield "  nothing to compare: every round needs both of its turns, with answers in each"
        return
    rounds = max(one.rounds for one in comparison.ratios.values())
    head = "   95 % interval" if rounds > 1 else ""
    yield f"  {'':<16}{'A':>12}{'B':>12}{'B / A':>10}{head}"
    for name, one in comparison.ratios.items():
        values = f"{one.first:>12,.4g}{one.second:>12,.4g}{one.ratio:>10.3f}"
        interval = "" if one.low is None else f"   {one.low:.3f} to {one.high:.3f}"
        yield f"  {name:<16}{values}{interval}"
    if rounds == 1:
        yield f"  1 round has no interval: that takes --rounds 2, and {_ENOUGH} to be trusted"
    elif rounds < _ENOUGH:
        yield f"  {rounds} rounds: too few for the interval to be trusted (--rounds {_ENOUGH})"
