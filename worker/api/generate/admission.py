"""Admission of requests: whether another one may enter, and how many are being served."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from worker.api.generate.engine import Engine
from worker.api.http.exchange import status_error
from worker.errors import RequestError
from worker.metrics.page import WorkerMetrics

_MEMORY_REFRESH_SECONDS = 0.25


class Admission:
    """Owns the counts of admitted sequences and of waiting tokens, and the state of the drain."""

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        *,
        max_num_seqs: int,
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None = None,
        memory: MemoryGuard | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._max_queued = max_num_queued_reqs
        self._max_queued_tokens = max_num_queued_tokens
        self._memory = memory
        self.num_inside = 0  # sequences being prepared, running or waiting
        self.num_queued_tokens = 0  # of prompts of requests that have had no output yet
        self._idle = asyncio.Event()
        self._idle.set()
        self.drains = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self.drains.is_set()

    def check(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Raise a 503 if the engine is down, or the worker is draining, short of memory or busy."""
        if not self._engine.is_alive:
            raise unavailable("The engine is not running")
        if self.draining:
            self._metrics.refused("draining")
            raise unavailable("The server is shutting down")
        if self._memory is not None and self._memory.exceeded:
            self._metrics.refused("memory")
            raise unavailable("The server is short of memory (--max-rss-bytes)")
        self._check_requests(num_sequences)
        self._check_tokens(num_tokens)

    def _check_requests(self, num_sequences: int) -> None:
        if self._max_queued is None:
            return
        # The engine's own count lags behind by a step: sequences since then that exceed the running
        # slots wait too. While none waits, new ones take the free slots first.
        beyond_slots = self.num_inside - self._max_num_seqs
        reported = self._engine.num_waiting_reported
        queued = beyond_slots if reported == 0 else max(reported, beyond_slots)
        if queued + num_sequences > self._max_queued:
            self._metrics.refused("max_num_queued_reqs")
            raise unavailable(
                "The engine is currently busy and cannot accept new requests."
                f" {max(queued, 0)} requests are waiting already (--max-num-queued-reqs)"
            )

    def _check_tokens(self, num_tokens: int) -> None:
        """Refuse a prompt beyond the limit of waiting tokens, unless no token waits."""
        # Otherwise a prompt longer than the limit would never be served.
        limit, waiting = self._max_queued_tokens, self.num_queued_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            self._metrics.refused("max_num_queued_tokens")
            raise unavailable(
                "The engine has reached its prefill token backlog limit."
                f" {waiting} tokens are waiting already (--max-num-queued-tokens)"
            )

    @contextmanager
    def entered(self, num_sequences: int) -> Iterator[None]:
        self.num_inside += num_sequences
        self._idle.clear()
        try:
            yield
        finally:
            self.num_inside -= num_sequences
            if self.num_inside == 0:
                self._idle.set()

    def queued(self, num_tokens: int) -> Callable[[], None]:
        """Count a prompt as waiting until the first call of the returned function."""
        # Branches share one prompt: it counts once, until the first of them has an output.
        self.num_queued_tokens += num_tokens
        left = num_tokens

        def prefilled() -> None:
            nonlocal left
            self.num_queued_tokens -= left
            left = 0

        return prefilled

    async def wait_idle(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def unavailable(message: str) -> RequestError:
    """Return a refusal; another worker, or this one later, may accept the request."""
    return status_error(HTTPStatus.SERVICE_UNAVAILABLE, message)


def resident_bytes() -> int:
    """Return the memory of this process in RAM; 0 where the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MemoryGuard:
    """Compares the memory of this process with its limit, at most four times a second."""

    def __init__(
        self, limit_bytes: int | None, read: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._limit = limit_bytes
        self._read = read
        self._clock = clock
        self._read_at: float | None = None
        self._last = 0

    @property
    def exceeded(self) -> bool:
        if self._limit is None:
            return False
        # A reading costs system calls, so not every request makes one.
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _MEMORY_REFRESH_SECONDS:
            self._read_at, self._last = now, self._read()
        return self._last > self._limit
