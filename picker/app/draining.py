"""The end of a picker: serve on until proxies have stopped sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

QUIET_SECONDS = 0.5  # no request for so long while draining: the proxies know
DRAIN_POLL_SECONDS = 0.05


async def until_quiet(
    under_way: Callable[[], int],
    decisions: Callable[[], int],
    hurried: asyncio.Event,
    timeout_seconds: float,
) -> float:
    """Return once nothing was under way and nothing was decided for a while, or time is up.

    Returns the seconds that are left; none once `hurried` is set. A proxy needs a moment to notice
    that a picker is not ready any more, and a request refused in that moment is an error to its
    client.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    quiet_since, seen = loop.time(), decisions()
    while not hurried.is_set() and loop.time() < deadline:
        if under_way() or decisions() != seen:
            quiet_since, seen = loop.time(), decisions()
        if loop.time() - quiet_since >= QUIET_SECONDS:
            break
        await asyncio.sleep(DRAIN_POLL_SECONDS)
    return 0.0 if hurried.is_set() else max(0.0, deadline - loop.time())
