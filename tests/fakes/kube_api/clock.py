"""The time the fake API server lives in: the event loop's, or one that a test moves by hand.

Timestamps, grace periods, watch timeouts, bookmarks and slow answers all ask the one clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol


class Timer(Protocol):
    """Something due that may be called off."""

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""


class Clock(Protocol):
    """Seconds since 1970, and things done later."""

    def now(self) -> float:
        """The present, in seconds since 1970."""

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on the loop after `seconds`."""


class LoopClock:
    """The running loop's own time: real, or virtual where the loop is virtual.

    Wall-clock time is read once, so that stamps and timers never disagree.
    """

    def __init__(self, epoch: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset = (time.time() if epoch is None else epoch) - self._loop.time()

    def now(self) -> float:
        """The loop's time, counted from 1970."""
        return self._loop.time() + self._offset

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """A plain timer of the loop."""
        return self._loop.call_later(seconds, callback)


@dataclass(order=True, slots=True)
class _Due:
    when: float
    order: int
    callback: Callable[[], object] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """Time that stands still until a test calls `advance`; it owns its list of timers."""

    def __init__(self, epoch: float = 1_800_000_000.0) -> None:
        self._now = epoch
        self._due: list[_Due] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Where the test has moved the time to."""
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Due when `advance` passes it."""
        due = _Due(self._now + seconds, next(self._order), callback)
        heapq.heappush(self._due, due)
        return due

    def advance(self, seconds: float) -> None:
        """Move on, calling on the way what becomes due, in order."""
        target = self._now + seconds
        while self._due and self._due[0].when <= target:
            due = heapq.heappop(self._due)
            self._now = max(self._now, due.when)
            if not due.cancelled:
                due.callback()
        self._now = target


async def sleep(clock: Clock, seconds: float) -> None:
    """Wait on `clock`, which may not be the loop's."""
    woken = asyncio.Event()
    timer = clock.call_later(seconds, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()


def stamp(seconds: float) -> str:
    """A time as API objects write it: RFC 3339, whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
