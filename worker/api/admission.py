"""The worker's door: who is let in, and how many are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from worker.api.engine import Engine
from worker.errors import RequestError
from worker.metrics import WorkerMetrics


class Admission:
    """Sole owner of the number of sequences inside and of the draining state."""

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        *,
        max_num_seqs: int,
        max_num_queued_reqs: int | None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._max_queued = max_num_queued_reqs
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_inside(self) -> int:
        """Sequences being prepared, running or waiting."""
        return self._inside

    def check(self) -> None:
        """Raise 503 when the engine is down, the worker drains, or the queue is full."""
        if not self._engine.is_alive:
            raise unavailable("The engine is not running")
        if self.draining:
            self._metrics.refused("draining")
            raise unavailable("The server is shutting down")
        if self._max_queued is None:
            return
        # The engine's own count lags behind by a step: whoever came since and exceeds the running
        # slots waits too. An engine that lets nobody wait has no queue, and room for one more.
        beyond_slots = self._inside - self._max_num_seqs
        reported = self._engine.num_waiting_reported
        if reported == 0 and beyond_slots < 0:
            return
        queued = max(reported, beyond_slots)
        if queued >= self._max_queued:
            self._metrics.refused("max_num_queued_reqs")
            raise unavailable(f"{queued} requests are waiting already (--max-num-queued-reqs)")

    @contextmanager
    def entered(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as inside for the duration of the block."""
        self._inside += num_sequences
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= num_sequences
            if self._inside == 0:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nobody is inside; False when that takes longer."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def unavailable(message: str) -> RequestError:
    """A refusal that another worker, or this one later, may not give."""
    return RequestError(message, status=503, type="Service Unavailable")
