"""Keeps what is done beside the requests from crowding them out."""

from __future__ import annotations

MAX_SHARE = 0.05  # of a process' time, for what it shares with the others


class Pace:
    """When to do something again that takes more time the larger the pool is.

    All times are in seconds, on one clock.
    """

    def __init__(self, max_share: float = MAX_SHARE) -> None:
        self._max_share = max_share
        self._next = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it may be done now."""
        return now >= self._next

    def spent(self, began: float, ended: float) -> None:
        """It was done in this time."""
        self._next = began + (ended - began) / self._max_share
