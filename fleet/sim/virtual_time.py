"""An event loop whose clock jumps over the waiting: minutes take as long as the work in them."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: when nobody has anything to do before some time, it is that time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now. Raises `RuntimeError` when nothing would ever happen any more."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits for somebody else: nothing would ever happen")
            self.now_seconds += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0. Real sockets and threads are not waited for, so nothing may wait for them."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._jumping.now_seconds

    def work(self, seconds: float) -> None:
        """Let time pass in which nothing else happens, as in a function that takes so long."""
        self._jumping.now_seconds += seconds


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    results = []

    async def kept() -> None:
        # Not as the task's result: a runner that ends has the task described with all of that.
        results.append(await main)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(kept())
    return results[0]
