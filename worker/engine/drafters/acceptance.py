"""What a draft is worth: the chance that it stands, learned from those that were verified.

Theory of operation
-------------------
Only judged positions count: those that stood, and the first that fell; what came after it was
never looked at. Each verdict is told to two estimates. The pooled one, of the drafter, is kept by
class of confidence and group of positions, over all sequences with a memory of some 200 verdicts
(cells with few verdicts lean on those of their class, and these on an optimistic prior, so that a
drafter is tried). The sequence's own is kept by class and by whether the position is the first,
with a memory of some thirty verdicts: it starts as the pooled one, which counts as one and a half
verdicts and fades like them, so a new sequence inherits what was learned from others. And it starts
anew whenever an average of the last four or so verdicts is three standard deviations off: two
verdicts against it are enough to notice that a sequence turns from copying into free text, while
drafts that stand one time in five are not given up for a run of bad luck.

The first position is apart since it asks another question: it tells if the drafter has found the
right place at all, the later ones if the run goes on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from worker.config import MAX_SPECULATIVE_TOKENS

# Upper ends of the classes of confidence; the last one ends at 1.
CLASS_ENDS = (0.3, 0.5, 0.7, 0.85, 0.95)
NUM_CLASSES = len(CLASS_ENDS) + 1
_PRIOR = (0.45, 0.6, 0.7, 0.8, 0.87, 0.9)  # by class, as two verdicts
_PRIOR_WEIGHT = 2.0
_CLASS_WEIGHT = 3.0  # verdicts of a cell that its class counts as
_POOLED_MEMORY = 0.995  # what a verdict counts after the next one
_OWN_MEMORY = 0.967
_RECENT_GAIN = 0.25
_RECENT_SPREAD = 0.38  # standard deviation of such an average, of one verdict's
_MIN_SPREAD = 0.085  # so that a single verdict never is news
_NEWS = 3.0  # spreads between what is recent and what was before
_NEWS_WEIGHT = 2.0
_POOLED_WEIGHT = 2.0  # verdicts of a sequence that the pool counts as
_MAX_CHANCE = 0.99
_NUM_GROUPS = 5


def _group(position: int) -> int:
    """Positions 0, 1, 2-3, 4-7 and all later ones are estimated together."""
    return min(position.bit_length(), _NUM_GROUPS - 1)


_GROUPS = tuple(_group(position) for position in range(MAX_SPECULATIVE_TOKENS))


def confidence_class(confidence: float) -> int:
    """The class of a confidence, 0 the least sure."""
    return bisect_left(CLASS_ENDS, confidence)


def positions_judged(num_verified: int, num_accepted: int) -> int:
    """How many of the drafts verified were looked at: up to the first that fell, with it."""
    return min(num_accepted + 1, num_verified)


class PooledAcceptance:
    """One drafter over all sequences; owns its counts."""

    def __init__(self) -> None:
        size = NUM_CLASSES * _NUM_GROUPS
        self._judged = [0.0] * size
        self._accepted = [0.0] * size
        self._class_judged = [0.0] * NUM_CLASSES
        self._class_accepted = [0.0] * NUM_CLASSES
        self._chances: list[float] | None = None

    def chances(self) -> list[float]:
        """The chance to stand, given that those before it stood, by class * 5 + group."""
        if self._chances is None:
            self._chances = [
                self._chance(index // _NUM_GROUPS, index) for index in range(len(self._judged))
            ]
        return self._chances

    def _chance(self, its_class: int, index: int) -> float:
        """One entry of `chances`."""
        of_class = (self._class_accepted[its_class] + _PRIOR_WEIGHT * _PRIOR[its_class]) / (
            self._class_judged[its_class] + _PRIOR_WEIGHT
        )
        of_cell = (self._accepted[index] + _CLASS_WEIGHT * of_class) / (
            self._judged[index] + _CLASS_WEIGHT
        )
        return min(of_cell, _MAX_CHANCE)

    def observe(self, its_class: int, position: int, stood: bool) -> None:
        """One verdict."""
        index = its_class * _NUM_GROUPS + _GROUPS[position]
        self._judged[index] = self._judged[index] * _POOLED_MEMORY + 1.0
        self._accepted[index] = self._accepted[index] * _POOLED_MEMORY + stood
        self._class_judged[its_class] = self._class_judged[its_class] * _POOLED_MEMORY + 1.0
        self._class_accepted[its_class] = self._class_accepted[its_class] * _POOLED_MEMORY + stood
        self._chances = None


class _Estimate:
    """A chance as one sequence shows it; owns the numbers."""

    __slots__ = ("chance", "recent", "weight")

    def __init__(self, inherited: float) -> None:
        self.chance = self.recent = inherited
        self.weight = 0.0

    def observe(self, stood: bool) -> None:
        """One verdict."""
        self.weight = self.weight * _OWN_MEMORY + 1.0
        self.chance += (stood - self.chance) / self.weight
        self.recent += (stood - self.recent) * _RECENT_GAIN
        spread = max(_MIN_SPREAD, _RECENT_SPREAD * math.sqrt(self.chance * (1.0 - self.chance)))
        if abs(self.recent - self.chance) > _NEWS * spread:
            self.chance = self.recent
            self.weight = _NEWS_WEIGHT
        self.chance = min(self.chance, _MAX_CHANCE)


class SequenceAcceptance:
    """One drafter for one sequence; owns its estimates."""

    __slots__ = ("_estimates", "_pool")

    def __init__(self, pool: PooledAcceptance) -> None:
        self._pool = pool
        # By class * 2 + (position > 0); None: never judged here.
        self._estimates: list[_Estimate | None] = [None] * (2 * NUM_CLASSES)

    def survivals(self, confidences: Sequence[float]) -> list[float]:
        """The chance of each draft to be accepted: itself and all before it. Never rises."""
        pooled, estimates = self._pool.chances(), self._estimates
        answer = []
        survival, is_later = 1.0, 0
        for confidence, group in zip(confidences, _GROUPS, strict=False):
            its_class = bisect_left(CLASS_ENDS, confidence)
            own = estimates[2 * its_class + is_later]
            chance = pooled[its_class * _NUM_GROUPS + group]
            if own is not None:
                weight = own.weight
                chance = (chance * _POOLED_WEIGHT + own.chance * weight) / (_POOLED_WEIGHT + weight)
            survival *= chance
            answer.append(survival)
            is_later = 1
        return answer

    def observe(self, confidences: Sequence[float], num_verified: int, num_accepted: int) -> None:
        """The first `num_verified` drafts were verified, `num_accepted` stood."""
        num_judged = positions_judged(num_verified, num_accepted)
        for position, confidence in enumerate(confidences[:num_judged]):
            self._judge(confidence_class(confidence), position, position < num_accepted)

    def _judge(self, its_class: int, position: int, stood: bool) -> None:
        """One verdict, here and in the pool."""
        index = 2 * its_class + (position > 0)
        own = self._estimates[index]
        if own is None:
            inherited = self._pool.chances()[its_class * _NUM_GROUPS + _GROUPS[position]]
            own = self._estimates[index] = _Estimate(inherited)
        own.observe(stood)
        self._pool.observe(its_class, position, stood)


class TypicalRun:
    """What a drafter's drafts survive on the average, before they are made; owns the averages.

    Fed with the estimated survivals of all drafts that were offered, so that it does not matter
    which of them were verified. Pooled over all sequences, by position.
    """

    _MEMORY = 64.0

    def __init__(self) -> None:
        self._counts = [0] * MAX_SPECULATIVE_TOKENS
        self._chances = [0.75] * MAX_SPECULATIVE_TOKENS
        self._later = 0.75  # over all positions but the first
        self._num_offers = 0

    @property
    def first(self) -> float:
        """The chance of the first draft to stand."""
        return self._chances[0]

    @property
    def later(self) -> float:
        """The chance of a later draft to stand, if those before it do."""
        return self._later

    def observe(self, chances: Sequence[float]) -> None:
        """One offer, as the chance of each draft given those before it."""
        for position, chance in enumerate(chances):
            count = self._counts[position] = self._counts[position] + 1
            self._chances[position] += (chance - self._chances[position]) / min(
                count + 1.0, self._MEMORY
            )
        if len(chances) > 1:
            self._num_offers += 1
            mean = sum(chances[1:]) / (len(chances) - 1)
            self._later += (mean - self._later) / min(self._num_offers + 1.0, self._MEMORY)

    def survivals(self, first: float, later: float, most: int) -> list[float]:
        """Expected survivals of `most` drafts for a sequence whose own averages are these."""
        answer = [first]
        scale = later / max(self._later, 0.01)
        for position in range(1, most):
            # Positions that were never seen are worth what the last one seen is.
            seen = position
            while seen > 1 and not self._counts[seen]:
                seen -= 1
            answer.append(answer[-1] * min(_MAX_CHANCE, scale * self._chances[seen]))
        return answer


class OwnRun:
    """The averages of one sequence's offers; owns them. They start as the drafter's."""

    __slots__ = ("_typical", "first", "later")

    _GAIN = 0.2

    def __init__(self, typical: TypicalRun) -> None:
        self._typical = typical
        self.first: float | None = None
        self.later: float | None = None

    def observe(self, survivals: Sequence[float]) -> None:
        """One offer: here and in the drafter's averages."""
        if not survivals:
            return
        before = [1.0, *survivals]
        chances = [here / max(b, 1e-9) for here, b in zip(survivals, before, strict=False)]
        self._typical.observe(chances)
        first = self._typical.first if self.first is None else self.first
        self.first = first + self._GAIN * (chances[0] - first)
        if len(chances) > 1:
            later = self._typical.later if self.later is None else self.later
            mean = sum(chances[1:]) / (len(chances) - 1)
            self.later = later + self._GAIN * (mean - later)

    def survivals(self, most: int) -> list[float]:
        """Expected survivals of the next offer's first `most` drafts."""
        first = self._typical.first if self.first is None else self.first
        later = self._typical.later if self.later is None else self.later
        return self._typical.survivals(first, later, most)
