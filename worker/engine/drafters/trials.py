"""Drafts that do not pay, verified now and then to see if they would stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from worker.engine.drafters.plans import Costs
from worker.engine.drafters.probing import INCOME
from worker.engine.drafters.track_records import SequenceRecord


_REFUND = 0.5


class Offered(Protocol):
    """The drafts at hand for a sequence."""

    @property
    def seq_id(self) -> int:
        """Whose they are."""
        ...

    @property
    def confidences(self) -> tuple[float, ...]:
        """How sure the drafter is of each."""
        ...


class Trials:
    """Which sequences have drafts on trial in this step; owns what trials may cost.

    In plain steps: each step adds 1 % of one for a single sequence, for n of them 1/√n of that, as
    there is less to be won; the allowance is never more than a hundred times as much. A full one is
    enough for one trial, however dear. What was won elsewhere is not spent on trials.
    """

    def __init__(self) -> None:
        self.seq_ids: set[int] = set()
        self._allowance = 0.5  # of the most
        self._scale = 1.0

    def earn(self) -> None:
        """A step was run."""
        self._allowance = min(1.0, self._allowance + INCOME)

    def add(
        self,
        offers: Sequence[Offered],
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
        scale = math.sqrt(costs.num_sequences)
        planned = sum(counts)
        risked = costs.seconds_of(planned)
        can_afford = (costs.affordable - risked) / costs.plain
        allowed = self._allowance / scale
        added, price = 0, 0.0
        for index, (offer, record) in enumerate(zip(offers, records, strict=True)):
            more = min(record.wanted, limit, len(offer.confidences)) - counts[index]
            if more <= 0 or added + more > left:
                continue
            if not record.is_probe_due(offer.confidences[0], now):
                continue
            its_price = (costs.seconds_of(planned + added + more) - risked) / costs.plain
            is_first_of_all = self._allowance >= 1.0 and not added
            if its_price > can_afford or not (its_price <= allowed or is_first_of_all):
                continue
            counts[index] += more
            self.seq_ids.add(offer.seq_id)
            added, price = added + more, its_price
        self._allowance -= price * scale
        self._scale = scale

    def won(self, steps: float) -> None:
        """Drafts on trial stood, which wins so many plain steps: half of that may be tried with."""
        self._allowance = min(1.0, self._allowance + _REFUND * steps * self._scale)
