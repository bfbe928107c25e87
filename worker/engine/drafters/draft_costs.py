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

With a few sequences drafts win more, and may cost what nobody assumed: a machine that is quick with
one token may take twice as long for two. What is assumed of b is doubted more there; chance is
measured on pairs of steps that are alike, lest a cliff pass for it; and where three of the last
four first drafts after a plain step agree that they cost something else, that is assumed of a from
then on. Fewer would be late steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from worker.engine.drafters.plans import FEW_SEQUENCES

_DOUBT_OF_ANY = 0.05  # standard deviation of `a` before anything is seen, in plain steps
# Of `b`, as a part of what is assumed; with more sequences.
_DOUBT_OF_EACH_OF_FEW, _DOUBT_OF_EACH = 1.0, 0.3
_MEMORY = 0.99  # of a pair, after the next one
_FIRST_NOISE, _FIRST_WEIGHT = 0.15, 4.0  # spread of a pair's logarithm, and the pairs it counts as
_MOST_SURPRISE = 3.0  # times that spread: more is chance
_CAUTION = 1.0  # standard errors that are added
_RECENT = 4  # pairs, of which three tell that drafts cost what nobody assumed
_MOST_NEWS = 2.0  # a logarithm
_NEWS, _NEWS_SPREADS = 0.15, 2.0  # beyond which it does; in plain steps, and in that spread


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

    def __init__(self, is_of_few: bool) -> None:
        self._is_of_few = is_of_few
        self._doubt_of_each = _DOUBT_OF_EACH_OF_FEW if is_of_few else _DOUBT_OF_EACH
        self._any_any = self._any_each = self._each_each = 0.0
        self._any_change = self._each_change = 0.0
        self._any_assumed = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)  # surprises, of drafts against none
        self._squares = _FIRST_WEIGHT * _FIRST_NOISE**2
        self._weight = _FIRST_WEIGHT

    def surcharge(self, assumed: float) -> Surcharge:
        """By what was seen so far, and what a draft is assumed to cost beforehand."""
        noise = self._squares / self._weight  # variance
        doubt = noise / (self._doubt_of_each * assumed) ** 2
        first = self._any_any + noise / _DOUBT_OF_ANY**2
        mixed, second = self._any_each, self._each_each + doubt
        any_change = self._any_change + noise / _DOUBT_OF_ANY**2 * self._any_assumed
        change = self._each_change + doubt * assumed
        determinant = first * second - mixed * mixed
        any_drafts = (second * any_change - mixed * change) / determinant
        each = (first * change - mixed * any_change) / determinant
        if any_drafts < 0.0:  # which is chance
            any_drafts, each = 0.0, change / second
        return Surcharge(
            any_drafts,
            each,
            noise * second / determinant,
            -noise * mixed / determinant,
            noise * first / determinant,
        )

    def observe(self, before: int, now: int, change: float, assumed: float) -> None:
        """A step with `now` drafts took longer than one with `before` by this factor (its
        logarithm).
        """
        known = self.surcharge(assumed)
        times = [max(0.1, 1.0 + known.expected(number)) for number in (before, now)]
        surprise = change + math.log(times[0] / times[1])
        if self._is_of_few and now and not before:
            news = self._news(surprise)
            if news:
                self._begin_anew(known.any + max(times) * math.expm1(news))
                return
        surprise = self._clipped(surprise)
        if not self._is_of_few:
            self._note_noise(surprise)
        # In plain steps, of which both steps are the multiple `scale`.
        scale = math.sqrt(times[0] * times[1])
        any_drafts, drafts = float((now > 0) - (before > 0)), float(now - before)
        seconds = known.any * any_drafts + known.each * drafts + scale * surprise
        weight = 1.0 / (scale * scale)
        self._any_any = self._any_any * _MEMORY + weight * any_drafts * any_drafts
        self._any_each = self._any_each * _MEMORY + weight * any_drafts * drafts
        self._each_each = self._each_each * _MEMORY + weight * drafts * drafts
        self._any_change = self._any_change * _MEMORY + weight * any_drafts * seconds
        self._each_change = self._each_change * _MEMORY + weight * drafts * seconds

    def observe_alike(self, change: float) -> None:
        """The same of a step with as many drafts as the one before: chance."""
        if self._is_of_few:
            self._note_noise(self._clipped(change))

    def _clipped(self, surprise: float) -> float:
        """Less what can only be chance."""
        most = _MOST_SURPRISE * math.sqrt(self._squares / self._weight)
        return max(-most, min(most, surprise))

    def _note_noise(self, surprise: float) -> None:
        self._squares = self._squares * _MEMORY + surprise * surprise
        self._weight = self._weight * _MEMORY + 1.0

    def _news(self, surprise: float) -> float:
        """By how much more drafts cost than what was known, as the last pairs agree; 0: they do
        not, or hardly more.
        """
        self._recent.append(max(-_MOST_NEWS, min(surprise, _MOST_NEWS)))
        middle = min(sorted(self._recent)[1:-1], key=abs, default=0.0)
        spread = math.sqrt(self._squares / self._weight)
        is_news = abs(middle) > max(_NEWS, _NEWS_SPREADS * spread)
        return middle if is_news and len(self._recent) == _RECENT else 0.0

    def _begin_anew(self, any_drafts: float) -> None:
        """What any drafts cost is assumed to be this, and nothing else is known."""
        self._any_assumed = max(0.0, any_drafts)
        self._any_any = self._any_each = self._each_each = 0.0
        self._any_change = self._each_change = 0.0
        self._recent.clear()


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
        return self._regression(num_sequences).surcharge(assumed)

    def observe(self, step: DecodingStep, assumed: float) -> None:
        """A step was run; what a draft in it was assumed to cost beforehand."""
        last, self._last = self._last, step
        if last is None or last.clock != step.clock - 1:
            return
        if last.num_sequences != step.num_sequences:
            return
        regression = self._regression(step.num_sequences)
        change = math.log(step.seconds) - math.log(last.seconds)
        if last.num_drafts != step.num_drafts:
            regression.observe(last.num_drafts, step.num_drafts, change, assumed)
        else:
            regression.observe_alike(change)

    def _regression(self, num_sequences: int) -> _Regression:
        """Of about so many sequences; what is few has none together with what is more."""
        key = num_sequences.bit_length()
        is_of_few = num_sequences <= FEW_SEQUENCES
        key = min(key, FEW_SEQUENCES.bit_length() - 1) if is_of_few else key
        found = self._regressions.get(key)
        if found is None:
            found = self._regressions[key] = _Regression(is_of_few)
        return found
