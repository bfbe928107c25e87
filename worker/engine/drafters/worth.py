"""What a token is worth that a draft wins, by sequence.

Theory of operation
-------------------
A step in which n sequences decode gives n tokens. Where somebody takes the place of whoever ends,
all tokens are alike: each is worth 1/n of a step. Where nobody comes, a sequence that gets ahead of
the others saves, in the end, one row of one later step, of t(m) - t(m - 1) seconds if m are left
then; only who ends last saves a whole step. Sequences that get on equally fast end together, and
share what their rows save: if all do, that is 1/n again; but if some copy while others do not,
drafts of the few that copy hardly bring the end nearer, whereas everybody pays for them.

Those that get on about as fast end together only on the average. Few tokens are won by chance, by
one sequence more and by another one less, and the last one of them has won fewer than most: of m
that gain g tokens each, with the spread of g events of chance, √g, the last is expected to gain
g - s √g, where s is how far the least of m normal numbers is below their mean (Blom's
approximation). Only what the last one gains brings the end nearer. So where little is won, as in
open chat, a token is worth little; where all copy, nearly all of it.

How fast a sequence gets on is what its drafts promise, verified or not, on the average. How likely
it is that somebody comes is what became of the last places (`Newcomers`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

from worker.engine.drafters.track_records import SequenceRecord

_NEAR = 1.5  # times as fast is about as fast
_HORIZON = 100.0  # steps that answers go on for
_PATIENCE = 16  # steps
_MEMORY = 6.0  # places
_FIRST_CHANCE, _LEAST_CHANCE = 0.75, 0.25
_DEAR = 0.2  # of 1/n, for a draft


class Newcomers:
    """Whether places that become free are taken soon; owns what became of the last ones."""

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE
        self._free_since: deque[int] = deque()

    def ended(self, now: int, num_left: int) -> None:
        """A sequence did, at step `now`; so many decode still. Whoever comes when nobody does takes
        no place among others.
        """
        self._free_since.append(now)
        if not num_left:
            self.pass_to(now + _PATIENCE + 1)

    def came(self, now: int) -> None:
        """A new sequence decodes."""
        self.pass_to(now)
        if self._free_since:
            self._free_since.popleft()
            self.chance += (1.0 - self.chance) / _MEMORY

    def pass_to(self, now: int) -> None:
        """Steps have gone by."""
        while self._free_since and now - self._free_since[0] > _PATIENCE:
            self._free_since.popleft()
            self.chance += (_LEAST_CHANCE - self.chance) / _MEMORY


def worths(
    paces: Sequence[float], plain: Callable[[int], float], chance_of_newcomer: float
) -> list[float]:
    """What a token of each sequence is worth, as a multiple of 1/n of a plain step.

    `paces` are tokens a step that sequences make, or could, at least 1; `plain` tells the seconds
    of a plain step of 1, …, n sequences.
    """
    num = len(paces)
    if num < 2 or chance_of_newcomer >= 1.0:
        return [1.0] * num
    falling = sorted(-pace for pace in paces)  # who ends first comes first
    whole = plain(num)
    shares: dict[float, float] = {}
    for pace in set(paces):
        first = bisect_left(falling, -pace * _NEAR)
        end = bisect_right(falling, -pace / _NEAR)
        before, after = plain(num - first), plain(num - end) if end < num else 0.0
        alone = num * (before - after) / (end - first) / whole
        alone *= _part_of_the_last(_HORIZON * (pace - 1.0), end - first)
        shares[pace] = chance_of_newcomer + (1.0 - chance_of_newcomer) * alone
    return [shares[pace] for pace in paces]


def _part_of_the_last(gained: float, num: int) -> float:
    """What the last of so many gains, each `gained` tokens on the average, as a part of that."""
    below = _least_of(num)
    return max(0.0, 1.0 - below / math.sqrt(gained)) if gained > below * below else 0.0


@lru_cache(maxsize=1024)
def _least_of(num: int) -> float:
    """How many standard deviations the least of so many normal numbers is below their mean."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


def weighed(
    survivals: Sequence[Sequence[float]],
    records: Sequence[SequenceRecord],
    plain: Callable[[int], float],
    price: float,
    chance_of_newcomer: float,
) -> list[list[float]]:
    """Survivals times what a token of their sequence is worth, which its record is told as well.

    `price` is what a draft costs, in plain steps. Where that is much, only the first few drafts
    count of a sequence of which few have stood so far: what a drafter does on the average says
    little of a new sequence.
    """
    num = len(records)
    for record, chances in zip(records, survivals, strict=True):
        record.note_promise(chances)
    shares = worths([record.pace for record in records], plain, chance_of_newcomer)
    answer = []
    for record, chances, share in zip(records, survivals, shares, strict=True):
        record.worth = share
        most = 1 + 2 * record.longest if price * num > _DEAR else None
        answer.append([share * chance for chance in chances[:most]])
    return answer
