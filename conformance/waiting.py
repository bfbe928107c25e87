"""Waiting for a condition instead of for time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from conformance.case import Violation

T = TypeVar("T")
_EVERY_SECONDS = 0.02


async def until(probe: Callable[[], Awaitable[T]], what: str, limit_seconds: float) -> T:
    """Call `probe` until it gives something true, and give that.

    Raises `Violation` that says `what` has not come about within the limit.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    while True:
        found = await probe()
        if found:
            return found
        if loop.time() > deadline:
            raise Violation(f"not within {limit_seconds:g} s: {what}")
        await asyncio.sleep(_EVERY_SECONDS)


async def ended(process: asyncio.subprocess.Process, limit_seconds: float) -> int | None:
    """The exit status of a process; None when it has not ended within the limit."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(process.wait(), limit_seconds)
    return None
