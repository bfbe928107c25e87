"""Keeps a number of serving processes running: starts them, replaces those that end, ends them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from picker.processes.restarts import RestartDelays
from picker.processes.serving import Serving

log = logging.getLogger(__name__)

WATCH_SECONDS = 5.0  # between two questions for the numbers that nobody else has asked for
MAX_UNANSWERED = 3

Begin = Callable[[int], Awaitable[Serving]]


class ServingFleet:
    """Owns the serving processes, one to each index below `size`.

    `begin` starts the process of an index, `ended` is told of each that has ended, whether it was
    asked to or not, and `served` of each that begins to serve.
    """

    def __init__(
        self,
        size: int,
        begin: Begin,
        ended: Callable[[Serving, bool], None],
        served: Callable[[Serving], None],
    ) -> None:
        self._begin, self._ended, self._served = begin, ended, served
        self._members: list[Serving | None] = [None] * size
        loop = asyncio.get_running_loop()
        self._firsts: list[asyncio.Future[str | None]] = [loop.create_future() for _ in range(size)]
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def members(self) -> Sequence[Serving]:
        """Those that serve now."""
        return [one for one in self._members if one is not None and one.revision is not None]

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start all, and keep them running until `drain` and `kill`."""
        for index in range(len(self._members)):
            keeping = self._keep(index)
            self._tasks.append(group.create_task(keeping, name=f"serving process {index}"))

    async def all_serve(self) -> str | None:
        """Return once all serve, or one has ended instead: then why."""
        for first in asyncio.as_completed(self._firsts):
            problem = await first
            if problem is not None:
                return problem
        return None

    async def watch(self) -> None:
        """Have all tell their numbers now and then, and end those that do not, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await asyncio.gather(*(one.tell() for one in self.members))
            for one in self.members:
                if one.unanswered >= MAX_UNANSWERED:
                    log.error("serving process %d does not answer", one.index)
                    one.kill()

    async def drain(self) -> None:
        """Have all end when nobody needs them, and replace none; called twice, at once."""
        self._ending.set()
        await asyncio.gather(*(one.drain() for one in self._members if one is not None))

    async def wait(self, seconds: float) -> bool:
        """Return once all have ended, or after a while; whether they have."""
        if not self._tasks:
            return True
        _, left = await asyncio.wait(self._tasks, timeout=seconds)
        return not left

    def kill(self) -> None:
        """End all at once, and replace none."""
        self._ending.set()
        for one in self._members:
            if one is not None:
                one.kill()

    async def _keep(self, index: int) -> None:
        delays, loop = RestartDelays(), asyncio.get_running_loop()
        while not self._ending.is_set():
            began = loop.time()
            reason = await self._live(index)
            self._begun(index, reason)
            if self._ending.is_set():
                return
            delay = delays.next(loop.time() - began)
            log.error("serving process %d: %s; replaced in %g s", index, reason, delay)
            await self._pause(delay)

    async def _live(self, index: int) -> str:
        """One life of a process; how it ended."""
        try:
            serving = self._members[index] = await self._begin(index)
        except OSError as error:
            return f"could not start: {error}"
        try:
            if self._ending.is_set():
                serving.kill()
            status = await serving.converse(self._on_ready)
        finally:
            serving.kill()
            self._members[index] = None
        self._ended(serving, not self._ending.is_set())
        return serving.failure or _said(status)

    def _on_ready(self, serving: Serving) -> None:
        self._begun(serving.index, None)
        self._served(serving)

    def _begun(self, index: int, problem: str | None) -> None:
        if not self._firsts[index].done():
            self._firsts[index].set_result(problem)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()


def _said(status: int) -> str:
    if status < 0:
        try:
            return f"ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"ended by signal {-status}"
    return f"ended with status {status}"
