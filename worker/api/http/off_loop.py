"""Work that would block the event loop for too long."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

# Characters or tokens. Of fewer, the hand-over to a thread costs more than it saves.
INLINE = 4096

_Value = TypeVar("_Value")


async def off_loop_when_large(size: int, work: Callable[[], _Value]) -> _Value:
    """Do work on `size` characters or tokens, in a thread unless they are few."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
