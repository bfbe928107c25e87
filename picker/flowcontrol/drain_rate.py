"""How fast the queue moves, and when another attempt may go better.

The rate counts requests let in, each worth exp(−age / 10 s), over what a steady stream would come
to in the time since the first of them.
"""

from __future__ import annotations

import math

TIME_CONSTANT_SECONDS = 10.0
LEAST_RETRY_SECONDS = 1
MOST_RETRY_SECONDS = 60
UNKNOWN_RETRY_SECONDS = 5
_SLOWEST = 1e-3  # a second; below it nothing is known


class DrainRate:
    """Owns the count. Times never go back."""

    def __init__(self) -> None:
        self._count = 0.0
        self._counted_at = 0.0
        self._began_at: float | None = None

    def let_in(self, now_seconds: float) -> None:
        """One more."""
        if self._began_at is None:
            self._began_at = now_seconds
        self._count = self._decayed(now_seconds) + 1.0
        self._counted_at = now_seconds

    def per_second(self, now_seconds: float) -> float:
        """Requests let in each second; 0 while that is unknown."""
        if self._began_at is None:
            return 0.0
        seen_seconds = max(1.0, now_seconds - self._began_at)  # one is not a thousand a second
        weight = TIME_CONSTANT_SECONDS * -math.expm1(-seen_seconds / TIME_CONSTANT_SECONDS)
        return self._decayed(now_seconds) / weight

    def retry_after_seconds(self, num_ahead: int, now_seconds: float) -> int:
        """In how many whole seconds those ahead have probably gone."""
        rate = self.per_second(now_seconds)
        if rate < _SLOWEST:
            return UNKNOWN_RETRY_SECONDS
        seconds = math.ceil(num_ahead / rate)
        return min(MOST_RETRY_SECONDS, max(LEAST_RETRY_SECONDS, seconds))

    def _decayed(self, now_seconds: float) -> float:
        return self._count * math.exp((self._counted_at - now_seconds) / TIME_CONSTANT_SECONDS)
