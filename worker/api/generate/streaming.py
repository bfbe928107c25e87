"""The sink of a streamed response: what each engine step gave, as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from worker.api.generate.choice import Choice, Piece
from worker.api.generate.frames import DONE, KEEP_ALIVE, Delta
from worker.api.generate.logprobs import Columns, LogprobsWriter, written
from worker.api.generate.prepared import Prepared
from worker.api.generate.response import (
    PromptRun,
    request_metrics,
    usage_of,
    usage_so_far,
)
from worker.api.http.exchange import Exchange
from worker.api.http.off_loop import off_loop_when_large
from worker.types import TokenLogprobs


class EventStream:
    """An exchange that events are written to, one after the other. Owns when that was last done,
    and whether the last one is written.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = asyncio.Lock()  # choices write from tasks of their own
        self._now = asyncio.get_running_loop().time
        self._wrote_at = self._now()
        self._ended = False

    async def write(self, frames: bytes, *, last: bool) -> None:
        """Write frames."""
        async with self._lock:
            await self._write(frames, last=last)

    @asynccontextmanager
    async def kept_alive(self, interval_seconds: float | None) -> AsyncIterator[None]:
        """Write a comment whenever nothing was written for as long; None: never."""
        if interval_seconds is None:
            yield
            return
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self._keep_alive(interval_seconds), name="sse-keep-alive")
            yield
            keeper.cancel()

    async def _keep_alive(self, interval_seconds: float) -> None:
        while True:
            await asyncio.sleep(interval_seconds - (self._now() - self._wrote_at))
            async with self._lock:
                if self._ended:
                    return
                if self._now() - self._wrote_at >= interval_seconds:
                    await self._write(KEEP_ALIVE, last=False)

    async def _write(self, frames: bytes, *, last: bool) -> None:
        self._wrote_at, self._ended = self._now(), last
        await self._exchange.write_event(frames, last=last)


@dataclass(slots=True)
class _Pending:
    """What came for a choice and has not been written yet."""

    writer: LogprobsWriter | None
    begun: bool = False
    written: bool = False  # at least one delta
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    echoed: Columns | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.entries += piece.logprobs

    def logprobs(self) -> dict[str, Any] | msgspec.Raw | None:
        if self.writer is None:
            return None
        echoed, self.echoed = self.echoed, None
        return written(self.writer, self.entries, echoed)

    def clear(self) -> None:
        self.written = True
        self.text, self.token_ids, self.entries = [], [], []


class StreamWriter:
    """Owns what of each choice is written, and how many choices still go on."""

    def __init__(self, prepared: Prepared, runs: Sequence[PromptRun], events: EventStream) -> None:
        self._frames = prepared.frames
        self._shown = prepared.shown
        self._runs = runs
        self._events = events
        new = prepared.shown.new_logprobs
        self._pending = {
            choice.index: _Pending(None if new is None else new())
            for run in runs
            for choice in run.choices
        }
        self._unfinished = len(self._pending)
        self._echoing = asyncio.Lock()  # the first choice writes the prompt for all

    async def __call__(self, run: PromptRun, choice: Choice, piece: Piece) -> None:
        """Write what one engine step gave one choice, in one piece; or keep it for later."""
        if not piece.token_ids and choice.ending is None:
            return  # of the prompt
        pending = self._pending[choice.index]
        pending.add(piece)
        frames = b"" if pending.begun else await self._begin(run, choice, pending)
        if self._is_due(choice, pending):
            frames += self._delta(run, choice, pending)
        if frames:
            await self._events.write(frames, last=self._unfinished == 0)

    async def _begin(self, run: PromptRun, choice: Choice, pending: _Pending) -> bytes:
        pending.begun = True
        if run.echo is not None:
            pending.text.insert(0, run.echo)
            if pending.writer is not None:
                # The first choice's outputs bring the prompt's log probabilities for all.
                await run.prompt_known.wait()
                async with self._echoing:
                    write_prompt = partial(run.echoed, pending.writer)
                    pending.echoed = await off_loop_when_large(run.num_told, write_prompt)
        usage = None
        if self._shown.continuous_usage:
            usage = usage_so_far(run, choice, cached=self._shown.cached_tokens)
        return self._frames.opening(choice.index, usage)

    def _is_due(self, choice: Choice, pending: _Pending) -> bool:
        if choice.ending is not None:
            return True
        if pending.written and len(pending.token_ids) < self._shown.interval:
            return False
        tells = self._shown.token_ids or pending.writer is not None
        return tells or any(pending.text)

    def _delta(self, run: PromptRun, choice: Choice, pending: _Pending) -> bytes:
        """The frame of what is pending; with the last one of all, what ends the response."""
        shown = self._shown
        usage = metrics = None
        if shown.continuous_usage:
            usage = usage_so_far(run, choice, cached=shown.cached_tokens)
        if choice.ending is not None:
            self._unfinished -= 1
        if self._unfinished == 0 and shown.metrics:
            metrics = request_metrics(self._runs)
        frames = self._frames.delta(
            Delta(
                choice.index,
                "".join(pending.text),
                choice.ending,
                logprobs=pending.logprobs(),
                token_ids=pending.token_ids if shown.token_ids else None,
                usage=usage,
                metrics=None if shown.usage else metrics,
            )
        )
        pending.clear()
        if self._unfinished:
            return frames
        if shown.usage:
            total = usage_of(self._runs, cached=shown.cached_tokens)
            frames += self._frames.usage(total, metrics)
        return frames + DONE
