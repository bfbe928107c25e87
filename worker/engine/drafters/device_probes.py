"""Drafts that a device drafter makes, and has verified, only to see if they would stand.

Theory of operation
-------------------
The device drafts at a price, and nobody sees its drafts beforehand. Where they do not pay it is
asked from time to time all the same, for the sequences that it drafted for the longest ago. A probe
is one sequence; where the others cost next to nothing, as on a device with room to spare, it is
many, which tell as much more.

A probe costs a part of a step whose results have to be waited for, and so do those of the next one.
With more than a few sequences, of which one draft wins little, probes are further apart.

A probe that won more than it cost was no loss, whatever is estimated: the next one follows at once.

What nobody drafts nobody learns of: where only first drafts paid, second ones would not be made any
more, whatever comes. So where a few sequences decode, one of whose drafts as many stood last as are
to be made now gets one more (of three at most): at once while those stand, else every second time.
The probe of an idle one need not be more than one draft then, unless the second is next to free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.engine.drafters.catch_ups import Leave
from worker.engine.drafters.plans import FEW_SEQUENCES, Costs
from worker.engine.drafters.probing import ProbeClock
from worker.engine.drafters.track_records import SequenceRecord

_NUM_DRAFTS = 2  # of each; one of a few sequences, where the second one costs as much
_PACE = 8  # where more than a few sequences decode
_MOST_AT_ONCE = 16  # sequences
_ALIKE = 1.25  # what these, or two drafts of one, may cost, by what one does


class DeviceProbes:
    """Owns what the probe under way cost, and has won since. `drafting` tells the seconds of so
    many sequences and rounds.
    """

    def __init__(self, drafting: Callable[[int, float], float]) -> None:
        self._drafting = drafting
        self._clock: ProbeClock | None = None  # of the drafter that was asked last
        self._won = 0.0
        self._is_told = False

    def add(
        self,
        records: Sequence[SequenceRecord],
        leaves: Sequence[Leave],
        counts: list[int],
        most: tuple[int, int],
        costs: Costs,
        clock: ProbeClock,
        now: int,
    ) -> int:
        """Have drafts made for sequences without a count, when their drafter's `clock` says so; for
        how many. Those still being read for that go on, whatever it says. `most` are of one
        sequence, and of all together.
        """
        limit, left = most[0], most[1] - sum(counts)
        is_few = len(records) <= FEW_SEQUENCES
        num_drafts = 1 if is_few and self._is_second_dear(costs) else _NUM_DRAFTS
        num_drafts = min(num_drafts, limit, left)
        if num_drafts <= 0:
            return 0
        idle = [i for i, leave in enumerate(leaves) if leave.to_probe and not counts[i]]
        chosen = [i for i in idle if leaves[i].is_unfinished and records[i].is_asked]
        if not chosen:
            if not idle or not clock.is_due(now):
                return 0
            idle.sort(key=lambda index: records[index].last_drafted)
            chosen = idle[: self._num_at_once(costs)]
            clock.tried(now, 1 if is_few else _PACE)
        chosen = chosen[: left // num_drafts]
        for index in chosen:
            records[index].is_asked = True
            counts[index] = num_drafts
        self._clock, self._is_told = clock, False
        self._won = -self._drafting(len(chosen), 1.0) / costs.plain
        return len(chosen)

    def lengthen(
        self,
        records: Sequence[SequenceRecord],
        counts: list[int],
        most: tuple[int, int],
        costs: Costs,
        now: int,
    ) -> None:
        """Have one draft more made for sequences with a count of whose drafts as many stood last,
        and whose turn it is; `most` are of one sequence, and of all together.
        """
        if costs.num_sequences > FEW_SEQUENCES:
            return
        limit, left = most[0], most[1] - sum(counts)
        longer = [
            index
            for index, (record, count) in enumerate(zip(records, counts, strict=True))
            if 0 < count < min(record.wanted, limit) and record.longer.is_due(now)
        ][:left]
        if not longer:
            return
        total, width = sum(counts) + len(longer), sum(count > 0 for count in counts)
        seconds = self._drafting(width, total / width)
        if seconds + costs.seconds_of(total) > costs.affordable:
            return
        for index in longer:
            counts[index] += 1
            records[index].lengthen(counts[index], now)

    def settle(self, won: float) -> None:
        """Some of its drafts were verified, which won so many plain steps."""
        self._won += won
        self._is_told = True

    def end_step(self, now: int) -> None:
        """All that were verified in this step are told."""
        if self._clock is not None and self._is_told and self._won > 0.0:
            self._clock.restart(now)
        self._is_told = False

    def _is_second_dear(self, costs: Costs) -> bool:
        """Whether two drafts of a sequence cost clearly more than one."""
        one, two = (self._drafting(1, float(n)) + costs.seconds_of(n) for n in (1, 2))
        return two > _ALIKE * one

    def _num_at_once(self, costs: Costs) -> int:
        """How many sequences a probe may be."""
        price = self._drafting(1, 1.0) + costs.seconds_of(1)
        most = 1
        while most < min(_MOST_AT_ONCE, costs.num_sequences):
            number = min(2 * most, _MOST_AT_ONCE, costs.num_sequences)
            if self._drafting(number, 1.0) + costs.seconds_of(number) > _ALIKE * price:
                break
            most = number
        return most
