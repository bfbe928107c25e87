"""Acceptance rates: how likely a draft is accepted, by its drafter's confidence and its place.

A sequence's own rates begin at those of all sequences. A device's drafter is asked before its
drafts and their confidences exist, so `DeviceRuns` keeps the survivals of recent drafts by place.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Self

from worker.engine.messages import SpeculationFigures

_CLASS_ENDS = (0.3, 0.5, 0.7, 0.85, 0.95)  # of confidences
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
_MOST = 0.99
_POOL_MEMORY = 0.98
_OWN_RATE, _TYPICAL_RATE = 0.2, 0.03
_FIRST_RUNS = 4  # that the typical run's first value counts as
_RUN_MEMORY = 0.985  # of what a sequence's run was like, a step later
_FADING = 0.98  # of what a rate has seen, a step later
_OWN_MEMORY, _POOL_WEIGHT = 0.93, 1.5


@dataclass(frozen=True, slots=True)
class Offer:
    seq_id: int
    confidences: tuple[float, ...]


class _Rate:
    """The share of accepted drafts. Older verdicts fade by `memory` with each new one, and slowly
    with each step: what is no longer verified gets a new chance. Times are in steps.
    """

    __slots__ = ("_judged", "_memory", "_stood", "at")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._stood = self._judged = 0.0
        self.at = 0

    def add(self, stood: bool, now: int) -> None:
        memory = self._memory * self._faded(now)
        self._stood = self._stood * memory + stood
        self._judged = self._judged * memory + 1.0
        self.at = now

    def mean(self, prior: float, weight: float, now: int) -> float:
        """Return the rate, with a `prior` that counts as `weight` verdicts."""
        faded = self._faded(now)
        return (self._stood * faded + prior * weight) / (self._judged * faded + weight)

    def _faded(self, now: int) -> float:
        return float(_FADING ** (now - self.at))


class Acceptance:
    """Sole owner of acceptance rates: those of all sequences, and each sequence's own."""

    def __init__(self) -> None:
        self._any = (_Rate(_POOL_MEMORY), _Rate(_POOL_MEMORY))  # first drafts, later ones
        self._pool: dict[int, _Rate] = {}
        self._own: dict[int, dict[int, _Rate]] = {}
        self._now = 0  # steps

    def pass_step(self) -> None:
        self._now += 1

    def survivals(self, seq_id: int, confidences: Sequence[float]) -> list[float]:
        """Return for each draft the chance (never rising) that it and those before are accepted."""
        own = self._own.get(seq_id, {})
        chances = (
            self._chance(own, _cell(confidence, place))
            for place, confidence in enumerate(confidences)
        )
        return list(accumulate(chances, mul))

    def observe(self, offer: Offer, num_verified: int, num_accepted: int) -> None:
        """Learn that the first `num_verified` drafts of an offer were verified and `num_accepted`
        accepted. Drafts after the first rejected one say nothing.
        """
        own = self._own.setdefault(offer.seq_id, {})
        for place in range(min(num_accepted + 1, num_verified)):
            cell, stood = _cell(offer.confidences[place], place), place < num_accepted
            own.setdefault(cell, _Rate(_OWN_MEMORY)).add(stood, self._now)
            self._pool.setdefault(cell, _Rate(_POOL_MEMORY)).add(stood, self._now)
            self._any[place > 0].add(stood, self._now)

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    def _chance(self, own: dict[int, _Rate], cell: int) -> float:
        now = self._now
        pooled = self._any[cell % 2].mean(_PRIOR, _PRIOR_WEIGHT, self._any[cell % 2].at)
        if cell in self._pool:
            pooled = self._pool[cell].mean(pooled, _PRIOR_WEIGHT, now)
        chance = own[cell].mean(pooled, _POOL_WEIGHT, now) if cell in own else pooled
        return min(_MOST, chance)


class DeviceRuns:
    """Sole owner of the device drafts' survivals, by place: the typical ones, each sequence's."""

    def __init__(self, most: int) -> None:
        self._typical = [_PRIOR] * most
        self._num_observed = 0
        self._own: dict[int, tuple[int, list[float]]] = {}  # as of which step
        self._now = 0  # steps

    def pass_step(self) -> None:
        self._now += 1

    def recall(self, seq_id: int) -> list[float]:
        """Return the survivals of a sequence's next drafts; in time they near the typical ones."""
        seen_at, run = self._own.get(seq_id, (0, self._typical))
        fading = 1.0 - _RUN_MEMORY ** (self._now - seen_at)
        pairs = zip(run, self._typical, strict=True)
        recalled = [own + fading * (typical - own) for own, typical in pairs]
        self._own[seq_id] = (self._now, recalled)
        return recalled

    def observe(self, seq_id: int, survivals: Sequence[float]) -> None:
        """Record the expected acceptance of a sequence's latest drafts, if there are any."""
        if not survivals:
            return
        _follow(self.recall(seq_id), survivals, _OWN_RATE, self._typical)
        self._num_observed += 1
        rate = max(_TYPICAL_RATE, 1.0 / (_FIRST_RUNS + self._num_observed))
        _follow(self._typical, survivals, rate, None)

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)


def _follow(
    run: list[float], survivals: Sequence[float], rate: float, shape: Sequence[float] | None
) -> None:
    """Move average survivals towards the latest ones. Later places follow the place before them in
    the proportion found in `shape` (None: by the same chance again), so that one short run of bad
    drafts does not end all long ones.
    """
    for place in range(len(run)):
        if place < len(survivals):
            target = survivals[place]
        elif shape is not None:
            target = run[place - 1] * shape[place] / max(shape[place - 1], 1e-6)
        else:
            target = run[place - 1] ** 2 / (max(run[place - 2], 1e-6) if place > 1 else 1.0)
        run[place] += rate * (min(1.0, target) - run[place])


def _cell(confidence: float, place: int) -> int:
    """Return the class of a draft's confidence, separate for first drafts."""
    return 2 * bisect_left(_CLASS_ENDS, confidence) + (place > 0)


@dataclass(slots=True)
class DraftTally:
    """Counts of verified drafts, of one sequence or of all. `accepted_histogram[i]` counts the runs
    (one sequence's share of a step with drafts) of which exactly i drafts were accepted.
    """

    accepted_histogram: list[int]
    num_draft_tokens: int = 0

    @classmethod
    def up_to(cls, most: int) -> Self:
        return cls([0] * (most + 1))

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draft_tokens += num_drafts
        self.accepted_histogram[num_accepted] += 1

    @property
    def num_runs(self) -> int:
        return sum(self.accepted_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(i * count for i, count in enumerate(self.accepted_histogram))

    @property
    def num_accepted_by_position(self) -> tuple[int, ...]:
        """The numbers of runs that accepted the first draft, the second, and so on."""
        return tuple(accumulate(self.accepted_histogram[:0:-1]))[::-1]

    def figures(self) -> SpeculationFigures:
        accepted, histogram = self.num_accepted_tokens, self.accepted_histogram[:]
        return SpeculationFigures(self.num_runs, self.num_draft_tokens, accepted, histogram)
