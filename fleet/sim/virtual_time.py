"""An event loop whose clock jumps over waiting times: minutes take as long as the work in them."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Never waits: if no event is ready, the clock jumps to the time of the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready events. Raises `RuntimeError` on a deadlock, when no timer is left."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock in virtual time: every task is waiting")
            self.now_seconds += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0. No task may wait for real sockets and threads."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_seconds

    def work(self, seconds: float) -> None:
        """Let time pass in which no other event happens, as in a blocking function."""
        self._jumping.now_seconds += seconds


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop, like `asyncio.run`, and return its result."""
    results = []

    async def stored() -> None:
        # Not as the task's result, of which the runner would make a description at its end.
        results.append(await main)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(stored())
    return results[0]
