"""When a process that ended is started again."""

from __future__ import annotations

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 10.0
STABLE_SECONDS = 60.0  # who lived so long did not end because of how it began


class RestartDelays:
    """Of one process: at once, then later and later while its lives are short."""

    def __init__(self) -> None:
        self._short_lives = 0

    def next(self, lived_seconds: float) -> float:
        """How long to wait after a life of so long."""
        if lived_seconds >= STABLE_SECONDS:
            self._short_lives = 0
        self._short_lives += 1
        if self._short_lives == 1:
            return 0.0
        delay = FIRST_DELAY_SECONDS * 2.0 ** min(self._short_lives - 2, 16)
        return min(delay, LONGEST_DELAY_SECONDS)
