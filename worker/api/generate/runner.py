"""Runs prepared requests on the engine, with one task and one record for each sequence."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from worker.api.generate import resumption
from worker.api.generate.choice import Choice, Piece, joined
from worker.api.generate.engine import OutputStream
from worker.api.generate.frames import KEEP_ALIVE, Delta
from worker.api.generate.logprobs import Columns, LogprobsWriter, written
from worker.api.generate.open_sequences import OpenSequences
from worker.api.generate.prepared import Prepared
from worker.api.generate.response import (
    AnswerCollector,
    PromptRun,
    prompt_runs,
    request_metrics,
    usage_of,
    usage_so_far,
)
from worker.api.generate.stages import add_stages
from worker.api.http.exchange import Exchange
from worker.api.http.off_loop import off_loop_when_large
from worker.engine.messages import RequestOutput
from worker.errors import EngineDeadError
from worker.metrics.page import WorkerMetrics
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import FinishReason, TokenLogprobs

Sink = Callable[[PromptRun, Choice, Piece], Awaitable[None]]


class Runner:
    def __init__(
        self, sequences: OpenSequences, tokenizer: Tokenizer, metrics: WorkerMetrics
    ) -> None:
        self._sequences = sequences
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def answer(self, prepared: Prepared, exchange: Exchange) -> None:
        """Run a request and reply. Cancellation aborts the sequences still running in the engine.

        Nothing is sent before the first token (or keep-alive), so that an error has a status of its
        own and a proxy can retry. Raises `RequestError`, `EngineDeadError`, `ClientGoneError`.
        """
        # A resumed stream may turn out to be over here: before the engine has the request.
        runs = prompt_runs(prepared, self._tokenizer)
        try:
            await self._answer(prepared, runs, exchange)
        finally:
            if exchange.trace is not None:
                records = [record for run in runs for record in run.records]
                add_stages(exchange.trace, runs[0].request.request_id, records)

    async def _answer(self, prepared: Prepared, runs: list[PromptRun], exchange: Exchange) -> None:
        if prepared.stream:
            await self._stream(prepared, runs, exchange)
            return
        collector = AnswerCollector(prepared, runs)
        await self.run(runs, collector)
        usage = usage_of(runs, cached=prepared.shown.cached_tokens)
        metrics = request_metrics(runs) if prepared.shown.metrics else None

        def body() -> bytes:
            answers = collector.answers(self._tokenizer.token_bytes)
            return prepared.frames.body(answers, usage, metrics)

        # A body with many log probabilities takes longer to write than a step.
        await exchange.reply(await off_loop_when_large(collector.num_tokens_shown, body))

    async def run(self, runs: Sequence[PromptRun], sink: Sink) -> None:
        """Run sequences to their ends. Each is recorded exactly once, however it ends."""
        # Sequences leave as they are recorded, so each is recorded once, however the block ends.
        pending = {choice.index: (run, choice) for run in runs for choice in run.choices}
        with ExitStack() as opened:
            opened.callback(self._record_rest, pending)
            try:
                jobs = [job for run in runs for job in self._open(run, opened)]
            except EngineDeadError:
                for _, choice in pending.values():
                    choice.reason = FinishReason.ERROR
                raise
            # The usual request needs no task of its own.
            if len(jobs) == 1:
                await self._follow(*jobs[0], sink, pending)
                return
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    name = job[2].request_id
                    group.create_task(self._follow(*job, sink, pending), name=name)

    async def _stream(self, prepared: Prepared, runs: list[PromptRun], exchange: Exchange) -> None:
        events = EventStream(exchange)
        running = self.run(runs, StreamWriter(prepared, runs, events))
        async with events.with_keep_alive(prepared.keep_alive_seconds):
            if prepared.resumption is None:
                await running
                return
            # Before the first event: headers cannot follow it.
            exchange.add_header(resumption.HEADER, prepared.resumption.header)
            async with asyncio.TaskGroup() as group:
                # A stream that has not begun needs no KV elsewhere: nothing of it was sent.
                leave = self._sequences.leave(runs[0].request.request_id, lambda: exchange.started)
                leaving = group.create_task(leave, name="leave-when-draining")
                await running
                leaving.cancel()

    def _open(
        self, run: PromptRun, opened: ExitStack
    ) -> list[tuple[PromptRun, Choice, OutputStream]]:
        streams = self._sequences.open(run.request)
        for stream in streams:
            opened.callback(stream.close)
        return [(run, c, stream) for c, stream in zip(run.choices, streams, strict=True)]

    async def _follow(
        self,
        run: PromptRun,
        choice: Choice,
        stream: OutputStream,
        sink: Sink,
        pending: dict[int, tuple[PromptRun, Choice]],
    ) -> None:
        previous: float | None = None
        try:
            while choice.ending is None:
                output = await stream.next()
                piece = run.take(choice, output)
                self._observe(choice, output, previous)
                previous = output.last_token_seconds
                await sink(run, choice, piece)
        except EngineDeadError:
            choice.reason = FinishReason.ERROR
            raise
        finally:
            # Also where a stop string ended the text, which the engine does not know.
            stream.close()
            del pending[choice.index]
            self._metrics.request_ended(run.record(choice, time.monotonic()))

    def _record_rest(self, pending: dict[int, tuple[PromptRun, Choice]]) -> None:
        for run, choice in pending.values():
            self._metrics.request_ended(run.record(choice, time.monotonic()))

    def _observe(self, choice: Choice, output: RequestOutput, previous: float | None) -> None:
        """Record the time to the first token, and later one gap for each step of an output."""
        latest = output.last_token_seconds
        if latest is None or not output.token_ids:
            return
        if previous is None:
            self._metrics.first_token(time.monotonic() - choice.request.arrival_seconds)
            return
        steps = output.num_steps
        self._metrics.next_tokens((latest - previous) / steps, steps)


class EventStream:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = asyncio.Lock()  # choices write from tasks of their own
        self._now = asyncio.get_running_loop().time
        self._wrote_at = self._now()
        self._ended = False

    async def write(self, frames: bytes, *, last: bool) -> None:
        async with self._lock:
            await self._write(frames, last=last)

    @asynccontextmanager
    async def with_keep_alive(self, interval_seconds: float | None) -> AsyncIterator[None]:
        """Write a comment whenever nothing was written for `interval_seconds`; None: never."""
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
    writer: LogprobsWriter | None
    begun: bool = False
    written: bool = False  # at least one delta
    pieces: list[Piece] = field(default_factory=list)
    echoed: Columns | None = None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Begin after the opening and these tokens, all of which have been written already."""
        self.begun, self.written = True, bool(token_ids)
        if self.writer is not None:
            self.writer.take([TokenLogprobs((token_id,), (0.0,), 1) for token_id in token_ids])

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | msgspec.Raw | None:
        if self.writer is None:
            return None
        echoed, self.echoed = self.echoed, None
        return written(self.writer, entries, echoed)

    def take(self) -> Piece:
        self.written = True
        pieces, self.pieces = self.pieces, []
        return joined(pieces)


class StreamWriter:
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
        self._is_marked = prepared.resumption is not None
        if prepared.resumption is not None and prepared.resumption.has_begun:
            [run] = runs
            self._pending[0].replay(run.request.output_token_ids)
        self._unfinished = len(self._pending)
        self._echoing = asyncio.Lock()  # the first choice writes the prompt for all

    async def __call__(self, run: PromptRun, choice: Choice, piece: Piece) -> None:
        # Log probabilities of the prompt come before any token.
        if not piece.token_ids and choice.ending is None:
            return  # of the prompt
        pending = self._pending[choice.index]
        frames = b"" if pending.begun else await self._begin(run, choice, pending)
        pending.pieces.append(piece)
        token_ids: Sequence[int] = ()
        if self._is_due(choice, pending):
            due = pending.take()
            token_ids = due.token_ids
            frames += self._delta(run, choice, due, pending.logprobs(due.logprobs))
        if frames and self._is_marked and self._unfinished:
            frames += resumption.mark(token_ids)
        if frames:
            await self._events.write(frames, last=self._unfinished == 0)

    async def _begin(self, run: PromptRun, choice: Choice, pending: _Pending) -> bytes:
        pending.begun = True
        if run.echo is not None:
            pending.pieces.append(Piece(run.echo))
            if pending.writer is not None:
                # The first choice's outputs bring the prompt's log probabilities for all.
                await run.prompt_known.wait()
                async with self._echoing:
                    write_prompt = partial(run.echoed, pending.writer)
                    pending.echoed = await off_loop_when_large(run.num_tokens_shown, write_prompt)
        usage = None
        if self._shown.continuous_usage:
            usage = usage_so_far(run, choice, cached=self._shown.cached_tokens)
        return self._frames.opening(choice.index, usage)

    def _is_due(self, choice: Choice, pending: _Pending) -> bool:
        # The last frame of a choice is due whatever is pending.
        if choice.ending is not None:
            return True
        # The first text is never held back: clients measure the time to it.
        if pending.written and self._shown.interval > 1:
            num_tokens = sum(len(piece.token_ids) for piece in pending.pieces)
            if num_tokens < self._shown.interval:
                return False
        if self._shown.token_ids or pending.writer is not None:
            return True
        return bool([p for p in pending.pieces if p.text or p.reasoning or p.calls])

    def _delta(self, run: PromptRun, choice: Choice, piece: Piece, logprobs: Any) -> bytes:
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
                piece.text,
                choice.ending,
                logprobs=logprobs,
                token_ids=piece.token_ids if shown.token_ids else None,
                usage=usage,
                metrics=None if shown.usage else metrics,
                reasoning=piece.reasoning,
                calls=piece.calls,
            )
        )
        if self._unfinished:
            return frames
        if shown.usage:
            total = usage_of(self._runs, cached=shown.cached_tokens)
            frames += self._frames.usage(total, metrics)
        return frames + self._frames.done
