"""What drafts add to a step, from steps that followed each other.

Theory of operation
-------------------
On a shared machine the time of a step of one size changes by half from one second to the next, and
sizes that were measured at different times cannot be compared: drafts seem free, or dear, for no
reason but the moment. Two steps in a row can be compared, if the same number of sequences decode
in both, but other numbers of drafts are verified. Their difference, as a part of a plain step, is
taken to be a for having drafts at all, and b for each: a Bayesian linear regression of two numbers,
older pairs counting less. What is assumed beforehand is a = 0 and for b what whoever asks makes of
the tokens of prompts; it counts as much against what was seen as that is noisy. So one pair of
steps decides nothing on a busy machine, and a few are enough on a quiet one.

To be worth it, drafts must repay what is expected and a standard error more: what few steps tell is
not trusted to make them cheap. Trials cost what is expected; they go on, and tell more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DOUBT_OF_ANY = 0.05  # standard deviation of `a` before anything is seen, in plain steps
_DOUBT_OF_EACH = 0.3  # of `b`, as a part of what is assumed
_MEMORY = 0.99  # of a pair, after the next one
_FIRST_NOISE, _FIRST_WEIGHT = 0.15, 4.0  # spread of a pair's logarithm, and the pairs it counts as
_MOST_SURPRISE = 3.0  # times that spread: more is chance
_CAUTION = 1.0  # standard errors that are added


@dataclass(frozen=True, slots=True)
class Surcharge:
    """Of any drafts and of each, in plain steps, with variances and covariance."""

    any: float
    each: float
    any_variance: float
    covariance: float
    each_variance: float

    def expected(self, num_drafts: int) -> float:
        """Of so many."""
        return self.any + self.each * num_drafts if num_drafts else 0.0

    def at_most(self, num_drafts: int) -> float:
        """Of so many (at least 1), and a standard error more."""
        variance = self.any_variance + 2 * num_drafts * self.covariance
        variance += num_drafts * num_drafts * self.each_variance
        return self.expected(num_drafts) + _CAUTION * math.sqrt(max(0.0, variance))


class _Regression:
    """Of about one number of sequences; owns weighted sums over pairs of steps."""

    def __init__(self) -> None:
        self._any_any = self._any_each = self._each_each = 0.0
        self._any_change = self._each_change = 0.0
        self._squares = _FIRST_WEIGHT * _FIRST_NOISE**2
        self._weight = _FIRST_WEIGHT

    def surcharge(self, assumed: float) -> Surcharge:
        """By what was seen so far, and what a draft is assumed to cost beforehand."""
        noise = self._squares / self._weight  # variance
        doubt = noise / (_DOUBT_OF_EACH * assumed) ** 2
        first = self._any_any + noise / _DOUBT_OF_ANY**2
        mixed, second = self._any_each, self._each_each + doubt
        change = self._each_change + doubt * assumed
        determinant = first * second - mixed * mixed
        any_drafts = (second * self._any_change - mixed * change) / determinant
        each = (first * change - mixed * self._any_change) / determinant
        if any_drafts < 0.0:  # which is chance
            any_drafts, each = 0.0, change / second
        return Surcharge(
            any_drafts,
            each,
            noise * second / determinant,
            -noise * mixed / determinant,
            noise * first / determinant,
        )

    def observe(self, before: int, now: int, ratio: float, assumed: float) -> None:
        """A step with `now` drafts took `ratio` of one with `before`."""
        known = self.surcharge(assumed)
        times = [max(0.1, 1.0 + known.expected(number)) for number in (before, now)]
        spread = math.sqrt(self._squares / self._weight)
        surprise = math.log(ratio * times[0] / times[1])
        surprise = max(-_MOST_SURPRISE * spread, min(_MOST_SURPRISE * spread, surprise))
        self._squares = self._squares * _MEMORY + surprise * surprise
        self._weight = self._weight * _MEMORY + 1.0
        # In plain steps, of which both steps are the multiple `scale`.
        scale = math.sqrt(times[0] * times[1])
        any_drafts, drafts = float((now > 0) - (before > 0)), float(now - before)
        change = known.any * any_drafts + known.each * drafts + scale * surprise
        weight = 1.0 / (scale * scale)
        self._any_any = self._any_any * _MEMORY + weight * any_drafts * any_drafts
        self._any_each = self._any_each * _MEMORY + weight * any_drafts * drafts
        self._each_each = self._each_each * _MEMORY + weight * drafts * drafts
        self._any_change = self._any_change * _MEMORY + weight * any_drafts * change
        self._each_change = self._each_change * _MEMORY + weight * drafts * change


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """One without tokens of prompts, which took `seconds`, at tick `clock`."""

    num_sequences: int
    num_drafts: int
    seconds: float
    clock: int


class DraftCosts:
    """What drafts add to a plain step; owns what is known of it, by the bit length of the number of
    sequences, and the last step.
    """

    def __init__(self) -> None:
        self._regressions: dict[int, _Regression] = {}
        self._last: DecodingStep | None = None

    def of(self, num_sequences: int, assumed: float) -> Surcharge:
        """In a step of so many sequences; a draft is assumed to cost `assumed` plain steps (more
        than nothing) where nothing was seen.
        """
        regression = self._regressions.get(num_sequences.bit_length(), _Regression())
        return regression.surcharge(assumed)

    def observe(self, step: DecodingStep, assumed: float) -> None:
        """A step was run; what a draft in it was assumed to cost beforehand."""
        last, self._last = self._last, step
        if last is None or last.clock != step.clock - 1:
            return
        if last.num_sequences == step.num_sequences and last.num_drafts != step.num_drafts:
            key = step.num_sequences.bit_length()
            regression = self._regressions.setdefault(key, _Regression())
            ratio = step.seconds / last.seconds
            regression.observe(last.num_drafts, step.num_drafts, ratio, assumed)
