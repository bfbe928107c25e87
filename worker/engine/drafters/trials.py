"""Drafts that do not pay, verified now and then to see if they would stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.drafters.plans import FEW_SEQUENCES, Costs
from worker.engine.drafters.probing import INCOME
from worker.engine.drafters.track_records import SequenceRecord

_REFUND = 0.7


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts at hand for one decoding sequence, maybe none, told by their confidences.

    `drafter` names who made them: estimates are kept apart by it.
    """

    seq_id: int
    drafter: str
    confidences: tuple[float, ...]


class Trials:
    """Which sequences have drafts on trial in this step; owns what trials may cost.

    In a step of a few sequences whatever the account affords. With more of them less can be won,
    and what was won elsewhere is not spent on trials: for n sequences each step adds 1/n of 1 % of
    a plain one, trials that succeed most of what they win, and the allowance is never more than a
    hundred times as much. A full one is enough for one trial, however dear.
    """

    def __init__(self) -> None:
        self.seq_ids: set[int] = set()
        self._allowance = 0.5  # of the most
        self._scale = 1.0

    @property
    def is_full(self) -> bool:
        """Whether as much as can be may be spent: the last trial is long ago."""
        return self._allowance >= 1.0

    def earn(self) -> None:
        """A step was run."""
        self._allowance = min(1.0, self._allowance + INCOME)

    def add(
        self,
        offers: Sequence[Offer],
        records: Sequence[SequenceRecord],
        counts: list[int],
        most: tuple[int, int],
        costs: Costs,
        now: int,
    ) -> None:
        """Have further drafts verified, of sequences whose turn it is: together, since the first
        one beyond those in `counts` may cost more than those after it. `most` are of one sequence,
        and further ones in all.
        """
        limit, left = most
        scale = float(costs.num_sequences)
        planned = sum(counts)
        risked = costs.seconds_of(planned)
        can_afford = (costs.affordable - risked) / costs.plain
        allowed = self._allowance / scale
        if costs.num_sequences <= FEW_SEQUENCES:
            allowed = can_afford
        added, price = 0, 0.0
        for index, (offer, record) in enumerate(zip(offers, records, strict=True)):
            more = min(record.wanted, limit, len(offer.confidences)) - counts[index]
            if more <= 0 or added + more > left:
                continue
            if not record.is_probe_due(offer.confidences[0], now):
                continue
            its_price = (costs.seconds_of(planned + added + more) - risked) / costs.plain
            is_owed = self.is_full and not added
            if not is_owed and its_price > min(allowed, can_afford):
                continue
            counts[index] += more
            self.seq_ids.add(offer.seq_id)
            added, price = added + more, its_price
        self._allowance = max(0.0, self._allowance - price * scale)
        self._scale = scale

    def won(self, steps: float) -> None:
        """Drafts on trial stood, which wins so many plain steps: some of that may be tried with."""
        self._allowance = min(1.0, self._allowance + _REFUND * steps * self._scale)
