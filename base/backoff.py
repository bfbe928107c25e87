"""Delays before a retry: they double, are bounded, and differ between clients."""

from random import Random
from typing import Final

FIRST_SECONDS: Final = 0.2
MAX_SECONDS: Final = 5.0
MAX_ASKED_SECONDS: Final = 60.0  # a server may not ask for a day


class Backoff:
    """Computes delays that double up to `max_seconds`, each shortened at random by up to a half, so
    that clients that lost a server together do not return together. Owns the number of consecutive
    failures.
    """

    def __init__(self, rng: Random, max_seconds: float = MAX_SECONDS) -> None:
        self._rng = rng
        self._max_seconds = max_seconds
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_seconds(
        self, asked_seconds: float | None = None, at_least_seconds: float = 0.0
    ) -> float:
        """Return the delay after one more failure, at least the one that the server asked for."""
        doublings = min(self._failures, 30)  # beyond every limit, and a float
        self._failures += 1
        # Shortened, not lengthened: `max_seconds` is a promise about the longest silence.
        delay = max(min(FIRST_SECONDS * 2.0**doublings, self._max_seconds), at_least_seconds)
        shortened = max(delay * self._rng.uniform(0.5, 1.0), at_least_seconds * 0.8)
        if asked_seconds is None:
            return shortened
        # Lengthened: no client returns before the time that the server asked for.
        asked = min(max(asked_seconds, 0.0), MAX_ASKED_SECONDS)
        return max(shortened, asked * self._rng.uniform(1.0, 1.25))
