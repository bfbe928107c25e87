"""Waiting for what other tasks and processes do, without a word about how long that takes."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import pytest

PATIENCE_SECONDS = 120.0


def pass_time(loop: asyncio.AbstractEventLoop) -> None:
    """More than an hour goes by on the clock of a loop, which may run in another thread, after what
    it is at: a timer that is about to be set is set before.
    """
    clock = loop.time

    def later() -> None:
        loop.time = lambda: clock() + 4000.0  # type: ignore[method-assign]

    loop.call_soon_threadsafe(later)


async def until(
    ask: Callable[[], Awaitable[Any] | Any], is_so: Callable[[Any], object] = bool, what: str = ""
) -> Any:
    """Ask again and again until it `is_so`, and return that answer; `ask` may be a coroutine
    function. Fails, saying what never happened, after a generous limit.
    """
    found: Any = None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = ask()
                if isawaitable(found):
                    found = await found
                if is_so(found):
                    return found
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"never happened: {what or ask}; the last answer was {found!r}")
