"""Runs prepared requests on the engine: one task for each sequence, one record for each end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial

from worker.api.generate.beam_runner import BeamRun, BeamRunner
from worker.api.generate.choice import Choice, Piece
from worker.api.generate.engine import Engine, OutputStream
from worker.api.generate.frames import DONE, Delta, Usage
from worker.api.generate.logprobs import num_told
from worker.api.generate.prepared import BeamOptions, Prepared
from worker.api.generate.response import (
    AnswerCollector,
    PromptRun,
    request_metrics,
    usage_of,
)
from worker.api.generate.streaming import EventStream, StreamWriter
from worker.api.http.exchange import Exchange
from worker.api.http.off_loop import off_loop_when_large
from worker.engine.messages import AddRequest, RequestOutput
from worker.errors import EngineDeadError
from worker.metrics import WorkerMetrics
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import FinishReason

Sink = Callable[[PromptRun, Choice, Piece], Awaitable[None]]


class Runner:
    """Runs prepared requests on the engine and writes the answers."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._beams = BeamRunner(engine, tokenizer, metrics)

    async def answer(self, prepared: Prepared, exchange: Exchange) -> None:
        """Run to the end and reply. Cancellation aborts whatever still runs in the engine.

        Nothing is sent before the first token (or the first keep-alive comment), so that an error
        before it has a status of its own and a proxy can still retry elsewhere. Raises
        `RequestError`, `EngineDeadError`, `ClientGoneError`.
        """
        if prepared.beam is not None:
            await self._answer_beams(prepared, prepared.beam, exchange)
            return
        runs = self._runs(prepared)
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

        await exchange.reply(await off_loop_when_large(collector.num_told, body))

    async def run(self, runs: Sequence[PromptRun], sink: Sink) -> None:
        """Run sequences to their ends. Each is recorded exactly once, however it ends."""
        pending = {choice.index: (run, choice) for run in runs for choice in run.choices}
        with ExitStack() as opened:
            opened.callback(self._record_rest, pending)
            try:
                jobs = [job for run in runs for job in self._open(run, opened)]
            except EngineDeadError:
                for _, choice in pending.values():
                    choice.reason = FinishReason.ERROR
                raise
            if len(jobs) == 1:
                await self._follow(*jobs[0], sink, pending)
                return
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    name = job[2].request_id
                    group.create_task(self._follow(*job, sink, pending), name=name)

    async def _stream(self, prepared: Prepared, runs: list[PromptRun], exchange: Exchange) -> None:
        events = EventStream(exchange)
        async with events.kept_alive(prepared.keep_alive_seconds):
            await self.run(runs, StreamWriter(prepared, runs, events))

    def _runs(self, prepared: Prepared) -> list[PromptRun]:
        runs: list[PromptRun] = []
        index = 0
        for place, request in enumerate(prepared.requests):
            choices = []
            for _ in range(1 + len(request.branch_ids)):
                choices.append(self._choice(index, request, prepared))
                index += 1
            echo = prepared.echoes[place] if prepared.echoes else None
            runs.append(PromptRun(request, choices, echo))
        return runs

    def _choice(self, index: int, request: AddRequest, prepared: Prepared) -> Choice:
        return Choice(index, request, prepared.text, self._tokenizer)

    def _open(
        self, run: PromptRun, opened: ExitStack
    ) -> list[tuple[PromptRun, Choice, OutputStream]]:
        streams = self._engine.open(run.request)
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
            stream.close()
            del pending[choice.index]
            self._metrics.request_ended(run.record(choice, time.monotonic()))

    def _record_rest(self, pending: dict[int, tuple[PromptRun, Choice]]) -> None:
        """Those whose turn never came: the engine was gone, or another's end was everybody's."""
        for run, choice in pending.values():
            self._metrics.request_ended(run.record(choice, time.monotonic()))

    def _observe(self, choice: Choice, output: RequestOutput, previous: float | None) -> None:
        """Time to first token, then one gap for every output step, however many tokens it gave; a
        consumer that lagged gets several steps as one output, and counts as that many equal gaps.
        """
        latest = output.last_token_seconds
        if latest is None or not output.token_ids:
            return
        if previous is None:
            self._metrics.first_token(time.monotonic() - choice.request.arrival_seconds)
            return
        steps = output.num_steps
        self._metrics.next_tokens((latest - previous) / steps, steps)

    async def _answer_beams(
        self, prepared: Prepared, options: BeamOptions, exchange: Exchange
    ) -> None:
        if prepared.stream:
            events = EventStream(exchange)
            async with events.kept_alive(prepared.keep_alive_seconds):
                runs = await self._beams.run(prepared, options)
                write = partial(self._streamed_beams, prepared, runs)
                frames = await off_loop_when_large(_num_told(runs), write)
                await events.write(frames, last=True)
            return
        runs = await self._beams.run(prepared, options)
        write = partial(self._whole_beams, prepared, runs)
        await exchange.reply(await off_loop_when_large(_num_told(runs), write))

    def _whole_beams(self, prepared: Prepared, runs: Sequence[BeamRun]) -> bytes:
        answers = [answer for run in runs for answer in self._beams.answers(prepared, run)]
        usage = _beam_usage(runs, cached=prepared.shown.cached_tokens)
        return prepared.frames.body(answers, usage, None)

    def _streamed_beams(self, prepared: Prepared, runs: Sequence[BeamRun]) -> bytes:
        """A whole stream: a beam search knows nothing before its end."""
        frames, shown = prepared.frames, prepared.shown
        parts: list[bytes] = []
        index = 0
        for run in runs:
            for beam, answer in zip(run.answers, self._beams.answers(prepared, run), strict=True):
                usage = None
                if shown.continuous_usage:
                    usage = run.usage(len(beam.token_ids), cached=shown.cached_tokens)
                parts.append(frames.opening(index, usage))
                delta = Delta(
                    index, answer.text, answer.ending, answer.logprobs, answer.token_ids, usage
                )
                parts.append(frames.delta(delta))
                index += 1
        if shown.usage:
            parts.append(frames.usage(_beam_usage(runs, cached=shown.cached_tokens), None))
        return b"".join((*parts, DONE))


def _beam_usage(runs: Sequence[BeamRun], *, cached: bool) -> Usage:
    each = [run.usage(run.num_generated, cached=cached) for run in runs]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in each),
        completion_tokens=sum(usage.completion_tokens for usage in each),
        cached_tokens=sum(run.num_cached for run in runs) if cached else None,
    )


def _num_told(runs: Sequence[BeamRun]) -> int:
    return sum(num_told(beam.entries) for run in runs for beam in run.answers)
