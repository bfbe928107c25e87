"""The numbers of one engine's messages: what was lost, what comes twice, what is a new life. Pure.

Messages are numbered from 0 in each life of an engine. A listener that joins late or is too slow
sees a gap; a number that is not higher than the last means a new life with an empty cache. Messages
that were asked for again may come a second time from the ordinary way, for a short while.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

TWICE_SECONDS = 5.0


class Continuity(Enum):
    """How the number of a message follows on those before, and so what to do about it."""

    APPLY = "apply"
    IGNORE = "ignore"
    GAP = "gap"
    RESTARTED = "restarted"


@dataclass(slots=True)
class EventStream:
    """Owns what is known of one engine's numbers. `applied` is the highest that was taken in."""

    applied: int | None = None
    _last_heard: int | None = None
    _repeats_until: float = float("-inf")

    @property
    def wanted(self) -> int:
        """The number that comes next if nothing is lost."""
        return 0 if self.applied is None else self.applied + 1

    def heard(self, number: int, now_seconds: float) -> Continuity:
        """Message `number` came the ordinary way.

        After `RESTARTED` nothing of before is known, and the same message is to be heard again.
        After `GAP` it is to be applied, with `taken`, once what is missing was asked for.
        """
        if self._last_heard is not None and number <= self._last_heard:
            self.forget()
            return Continuity.RESTARTED
        if self.applied is not None and number <= self.applied:
            if now_seconds >= self._repeats_until:
                self.forget()
                return Continuity.RESTARTED
            self._last_heard = number
            return Continuity.IGNORE
        self._last_heard = number
        return Continuity.APPLY if number == self.wanted else Continuity.GAP

    def taken(self, number: int) -> None:
        """Message `number` was applied, or could not be understood."""
        self.applied = number

    def replayed(self, now_seconds: float) -> None:
        """What was missing has come; the ordinary way may bring some of it again."""
        self._repeats_until = now_seconds + TWICE_SECONDS

    def forget(self) -> None:
        """The engine is another one."""
        self.applied = self._last_heard = None
        self._repeats_until = float("-inf")
