"""Detects losses, repeats and restarts from the numbers of one engine's messages. Pure.

Numbers begin at 0 after each start: a gap is a loss, and a number that does not rise is a restart
with an empty cache. For a short while after a replay, the subscription may repeat replayed
messages.
"""

from dataclasses import dataclass
from enum import Enum

REPEAT_SECONDS = 5.0


class Continuity(Enum):
    """The position of a message in its stream, and so what to do with it."""

    APPLY = "apply"
    IGNORE = "ignore"
    GAP = "gap"
    RESTARTED = "restarted"


@dataclass(slots=True)
class EventStream:
    """Owns the position in one engine's stream. `applied` is the highest number applied."""

    applied: int | None = None
    _last_received: int | None = None
    _repeats_until: float = float("-inf")

    @property
    def wanted(self) -> int:
        return 0 if self.applied is None else self.applied + 1

    def receive(self, number: int, now_seconds: float) -> Continuity:
        """Classify a message; after `RESTARTED` and a filled `GAP` the caller passes it again."""
        if self._last_received is not None and number <= self._last_received:
            self.reset()
            return Continuity.RESTARTED
        if self.applied is not None and number <= self.applied:
            if now_seconds >= self._repeats_until:
                self.reset()
                return Continuity.RESTARTED
            self._last_received = number
            return Continuity.IGNORE
        self._last_received = number
        return Continuity.APPLY if number == self.wanted else Continuity.GAP

    def mark_applied(self, number: int) -> None:
        """Note that message `number` was applied, or could not be decoded."""
        self.applied = number

    def end_replay(self, now_seconds: float) -> None:
        """Note that a replay is complete; the subscription may repeat some of its messages."""
        self._repeats_until = now_seconds + REPEAT_SECONDS

    def reset(self) -> None:
        self.applied = self._last_received = None
        self._repeats_until = float("-inf")
