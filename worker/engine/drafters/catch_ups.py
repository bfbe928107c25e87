"""What the device's drafter reads of a sequence before it drafts for it, and when that is allowed.

Theory of operation
-------------------
A drafter on the device has to read a sequence before its first drafts: all of the prompt, and
whatever was decoded while it was not asked. That may take as long as many steps. It is no part of
what a round of drafting costs, and comes back only with the many rounds that follow, or not at all
where answers are short or drafts fall.

So it is not paid from the account at once, which might not be filled again for hundreds of steps,
but counted as its debt (`probing.Account`): what is earned and won beyond what an account begins
with pays the debt off. Reading begins while the debt is small where drafts pay, and for the sake of
a probe only when there is none. Where reading never comes back, the account's income pays for one
sequence now and then, and that is all that is lost. No more sequences begin while others, begun in
an earlier step, are still being read: a few that are through are worth more than many half read.
What has begun is read to its end, unless the debt gets very large.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from worker.engine.drafters.probing import Account

_MOST_AT_BEGIN = 3.0  # plain steps of debt, at which nobody else begins
_MOST_WHILE_READING = 32.0
_NEAR = 64  # steps since the last drafts, after which there is much to read again


@dataclass(frozen=True, slots=True)
class Leave:
    """Whether a sequence may be asked for drafts where that pays, and for a probe. `is_unfinished`:
    it was asked in vain last time, since it is still being read.
    """

    to_ask: bool
    to_probe: bool
    is_unfinished: bool


class CatchUps:
    """Owns when each sequence was last drafted for, who is being read, and what is not priced yet.
    Times are steps.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._drafted_at: dict[int, int] = {}
        self._read_at: dict[int, int] = {}  # of those begun and not through
        self._asked: list[int] = []
        self._seconds = 0.0  # spent, and not charged yet

    def leaves(self, seq_ids: Sequence[int], now: int) -> list[Leave]:
        """What may be done with each of these sequences in this step."""
        debt = self._account.debt
        is_idle = not self._seconds and all(now - at > _NEAR for at in self._read_at.values())
        leaves = []
        for seq_id in seq_ids:
            drafted_at = self._drafted_at.get(seq_id)
            is_unfinished = seq_id in self._read_at
            goes_on = drafted_at is not None and now - drafted_at <= _NEAR
            goes_on = goes_on or (is_unfinished and debt < _MOST_WHILE_READING)
            to_ask = goes_on or (is_idle and debt < _MOST_AT_BEGIN)
            to_probe = goes_on or (is_idle and debt <= 0.0)
            leaves.append(Leave(to_ask, to_probe, is_unfinished))
        return leaves

    def asked(self, seq_ids: Iterable[int]) -> None:
        """These are asked for drafts in this step."""
        self._asked = list(seq_ids)

    def observe(self, seconds: float, drafted: Collection[int], now: int) -> None:
        """The step's reading took so long; these sequences have drafts."""
        self._seconds += max(0.0, seconds)
        for seq_id in self._asked:
            if seq_id in drafted:
                self._drafted_at[seq_id] = now
                self._read_at.pop(seq_id, None)
            elif seconds > 0.0:
                self._read_at[seq_id] = now
        self._asked = []

    @property
    def is_owing(self) -> bool:
        """Whether something was read and not charged yet."""
        return self._seconds > 0.0

    def charge(self, plain_seconds: float) -> None:
        """Charge for what was read; a plain step takes so long."""
        if self.is_owing:
            self._account.borrow(self._seconds / plain_seconds)
            self._seconds = 0.0

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; unknown ones are ignored."""
        self._drafted_at.pop(seq_id, None)
        self._read_at.pop(seq_id, None)
