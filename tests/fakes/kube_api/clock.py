"""The clock of the fake API server: that of the event loop, real or virtual."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime


class LoopClock:
    """The running loop's time since 1970; wall-clock time is read once, so timers agree."""

    def __init__(self, epoch: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset = (time.time() if epoch is None else epoch) - self._loop.time()

    def now(self) -> float:
        return self._loop.time() + self._offset

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, callback)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
