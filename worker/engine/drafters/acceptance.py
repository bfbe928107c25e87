"""What a draft is worth: the chance that it stands, learned from those that were verified.

Theory of operation
-------------------
Only judged positions count: those that stood, and the first that fell; what came after it was
never looked at. Each verdict is told to two estimates. The pooled one, of the drafter, is kept by
class of confidence and group of positions, over all sequences with a memory of some fifty verdicts
(cells with few verdicts lean on those of their class, and these on an optimistic prior, so that a
drafter is tried). The sequence's own is kept by class and by whether the position is the first,
with a memory of some thirty verdicts, beside which the pooled one counts as one more: so a new
sequence inherits what was learned from others. And it starts
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
_POOLED_MEMORY = 0.98  # what a verdict counts after the next one
_OWN_MEMORY = 0.967
_RECENT_GAIN = 0.25
_RECENT_SPREAD = 0.38  # standard deviation of such an average, of one verdict's
_MIN_SPREAD = 0.085  # so that a single verdict never is news
_NEWS = 3.0  # spreads between what is recent and what was before
_NEWS_WEIGHT = 2.0
_POOLED_WEIGHT = 1.0  # verdicts of a sequence that the pool counts as
_MAX_CHANCE = 0.99
_NUM_GROUPS = 5
_TYPICAL_PRIOR = 0.75
_TYPICAL_MEMORY = 64.0  # offers
_OWN_RUN_GAIN = 0.2
_LEAST_SURVIVAL = 1e-6  # so that nothing is divided by 0


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
            self._chances = [self.chance(index) for index in range(len(self._judged))]
        return self._chances

    def chance(self, index: int) -> float:
        """One entry of `chances`."""
        its_class = index // _NUM_GROUPS
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
        for position in range(positions_judged(num_verified, num_accepted)):
            its_class = confidence_class(confidences[position])
            self._judge(its_class, position, position < num_accepted)

    def _judge(self, its_class: int, position: int, stood: bool) -> None:
        """One verdict, here and in the pool."""
        index = 2 * its_class + (position > 0)
        own = self._estimates[index]
        if own is None:
            inherited = self._pool.chance(its_class * _NUM_GROUPS + _GROUPS[position])
            own = self._estimates[index] = _Estimate(inherited)
        own.observe(stood)
        self._pool.observe(its_class, position, stood)


class TypicalRun:
    """What a drafter's drafts survive on the average, before they are made; owns the averages.

    Fed with the estimated survivals of drafts that were offered, so that it does not matter which
    of them were verified. Pooled over all sequences, by position.
    """

    def __init__(self) -> None:
        self._counts = [0] * MAX_SPECULATIVE_TOKENS
        self._chances = [_TYPICAL_PRIOR] * MAX_SPECULATIVE_TOKENS
        self.later = _TYPICAL_PRIOR  # chance of a later draft to stand, if those before it do
        self._num_later = 0
        self._ratios: list[float] | None = None

    @property
    def first(self) -> float:
        """The chance of the first draft to stand."""
        return self._chances[0]

    def observe(self, survivals: Sequence[float]) -> None:
        """One offer of at least one draft."""
        self._ratios = None
        before = 1.0
        for position, survival in enumerate(survivals):
            count = self._counts[position] = self._counts[position] + 1
            gain = 1.0 / min(count + 1.0, _TYPICAL_MEMORY)
            self._chances[position] += (survival / before - self._chances[position]) * gain
            before = max(survival, _LEAST_SURVIVAL)
        if len(survivals) > 1:
            self._num_later += 1
            gain = 1.0 / min(self._num_later + 1.0, _TYPICAL_MEMORY)
            self.later += (later_chance(survivals) - self.later) * gain

    def survivals(self, first: float, later: float, most: int) -> list[float]:
        """Expected survivals of `most` drafts for a sequence whose own averages are these."""
        ratios = self._ratios
        if ratios is None or len(ratios) < most:
            ratios = self._ratios = self._make_ratios(most)
        answer = [first]
        for position in range(1, most):
            first *= min(_MAX_CHANCE, later * ratios[position])
            answer.append(first)
        return answer

    def _make_ratios(self, most: int) -> list[float]:
        """The chance at each position as a multiple of that at any later one. Positions that were
        never seen are worth what the last one seen is.
        """
        scale = 1.0 / max(self.later, _LEAST_SURVIVAL)
        answer = [1.0]
        for position in range(1, most):
            is_seen = self._counts[position] > 0
            answer.append(self._chances[position] * scale if is_seen else answer[-1])
        return answer


class OwnRun:
    """The averages of one sequence's offers; owns them. They start as the drafter's."""

    __slots__ = ("_first", "_later", "_typical")

    def __init__(self, typical: TypicalRun) -> None:
        self._typical = typical
        self._first: float | None = None
        self._later: float | None = None

    def observe(self, survivals: Sequence[float]) -> None:
        """One offer of at least one draft, as the estimated survivals of its drafts."""
        first = self._typical.first if self._first is None else self._first
        self._first = first + _OWN_RUN_GAIN * (survivals[0] - first)
        if len(survivals) > 1:
            later = self._typical.later if self._later is None else self._later
            self._later = later + _OWN_RUN_GAIN * (later_chance(survivals) - later)

    def survivals(self, most: int) -> list[float]:
        """Expected survivals of the next offer's first `most` drafts."""
        first = self._typical.first if self._first is None else self._first
        later = self._typical.later if self._later is None else self._later
        return self._typical.survivals(first, later, most)


def later_chance(survivals: Sequence[float]) -> float:
    """The chance of a later draft to stand if those before it do, on the geometric average; of at
    least two drafts.
    """
    ratio = survivals[-1] / max(survivals[0], _LEAST_SURVIVAL)
    return float(min(ratio, 1.0) ** (1.0 / (len(survivals) - 1)))
