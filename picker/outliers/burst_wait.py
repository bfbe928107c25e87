"""Lets requests wait a moment when all endpoints have just been filled and none has answered yet.

A crowd that comes to an idle pool is all decided before the first answer is there. If one of the
endpoints fails everything, its share of the crowd would be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Settles(Protocol):
    """Knows whether answers that come any moment should be waited for."""

    def is_unsure(self, now_seconds: float) -> bool:
        """Whether they should."""
        ...


class NeverUnsure:
    """Waits for nothing."""

    def is_unsure(self, now_seconds: float) -> bool:
        """No."""
        return False


class Settling:
    """Owns those that wait. `patience_seconds` is the longest that one does."""

    def __init__(
        self, memory: Settles, clock: Callable[[], float], patience_seconds: float
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._event = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether nobody needs to wait now."""
        return not self._memory.is_unsure(self._clock())

    async def settled(self) -> None:
        """Wait until the answers are there, or for the patience; at once while it is settled."""
        if self.is_settled:
            return
        event = self._event
        try:
            async with asyncio.timeout(self._patience_seconds):
                await event.wait()
        except TimeoutError:
            return  # what is silent so long does not fail at once

    def wake(self) -> None:
        """The answers are there: all that wait go on."""
        self._event.set()
        self._event = asyncio.Event()
