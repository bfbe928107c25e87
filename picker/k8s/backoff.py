"""How long to leave a server alone that refused or did not answer."""

from __future__ import annotations

from random import Random
from typing import Final

FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 5.0
LONGEST_ASKED_SECONDS: Final = 60.0


class Backoff:
    """Delays that double up to `longest_seconds`, each shortened by up to a half at random, so that
    those who lost a server together do not come back together. Owns how many failed in a row.
    """

    def __init__(self, rng: Random, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._rng = rng
        self._longest_seconds = longest_seconds
        self._failures = 0

    def reset(self) -> None:
        """The server is well: the next delay is short again."""
        self._failures = 0

    def next_seconds(
        self, asked_seconds: float | None = None, at_least_seconds: float = 0.0
    ) -> float:
        """The delay after one more failure.

        It is never shorter than `at_least_seconds`, nor than what the server `asked`, as long as
        that is not unreasonable.
        """
        doublings = min(self._failures, 30)
        self._failures += 1
        delay = max(min(FIRST_SECONDS * 2.0**doublings, self._longest_seconds), at_least_seconds)
        shortened = max(delay * self._rng.uniform(0.5, 1.0), at_least_seconds * 0.8)
        if asked_seconds is None:
            return shortened
        asked = min(max(asked_seconds, 0.0), LONGEST_ASKED_SECONDS)
        return max(shortened, asked * self._rng.uniform(1.0, 1.25))
