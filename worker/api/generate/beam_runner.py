"""Runs beam searches as requests for one token each, which the prefix cache makes cheap: a step
costs every beam its one newest token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from worker.api.generate.beam import Beam, BeamRules, Beams, advance, best, is_over
from worker.api.generate.choice import given_up
from worker.api.generate.engine import Engine, OutputStream
from worker.api.generate.frames import Answer, Ending, Usage
from worker.api.generate.logprobs import written
from worker.api.generate.prepared import BeamOptions, Prepared
from worker.engine.messages import AddRequest, RequestOutput
from worker.errors import EngineDeadError, RequestError
from worker.metrics import RequestRecord, WorkerMetrics
from worker.tokenizer.detokenize import decode
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import FinishReason, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class BeamRun:
    """The search of one prompt. Owns its beams and what the metrics hear of it: for them a search
    is one request, however many the engine saw.
    """

    request: AddRequest
    rules: BeamRules
    beams: Beams
    reason: FinishReason = FinishReason.ABORT
    first: RequestOutput | None = None
    last: RequestOutput | None = None

    @property
    def answers(self) -> tuple[Beam, ...]:
        """The best beams so far."""
        return best(self.beams, self.rules)

    @property
    def num_generated(self) -> int:
        """Tokens of the answers."""
        return sum(len(beam.token_ids) for beam in self.answers)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that the prefix cache held before the search."""
        return 0 if self.first is None else self.first.num_cached_tokens

    def usage(self, num_tokens: int, *, cached: bool) -> Usage:
        """Counts of the prompt with so many tokens of answers."""
        num_prompt = len(self.request.prompt_token_ids)
        return Usage(num_prompt, num_tokens, self.num_cached if cached else None)

    def record(self, now: float) -> RequestRecord:
        """The search as the metrics see it."""
        first = self.first or RequestOutput("", [])
        last = self.last or first
        return RequestRecord(
            reason=self.reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_generation_tokens=self.num_generated,
            max_tokens=self.request.params.max_tokens,
            num_preemptions=last.num_preemptions,
            arrival_seconds=self.request.arrival_seconds,
            scheduled_seconds=first.scheduled_seconds,
            first_token_seconds=first.first_token_seconds,
            last_token_seconds=last.last_token_seconds,
            finished_seconds=now,
            num_cached_tokens=self.num_cached,
            n=self.rules.width,
            max_num_generation_tokens=max(len(beam.token_ids) for beam in self.answers),
        )


class BeamRunner:
    """Runs searches on the engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(self, prepared: Prepared, options: BeamOptions) -> list[BeamRun]:
        """Search for every prompt at once. Raises `RequestError`, `EngineDeadError`."""
        runs = [
            BeamRun(request, _rules(request, options), Beams()) for request in prepared.requests
        ]
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(self._search(run), name=run.request.request_id)
        return runs

    def answers(self, prepared: Prepared, run: BeamRun) -> list[Answer]:
        """The choices of one search, best first; of one that was aborted, how far it had come."""
        cut = FinishReason.LENGTH if run.reason is not FinishReason.ABORT else FinishReason.ABORT
        return [
            self._answer(prepared, beam, FinishReason.STOP if beam.ended else cut)
            for beam in run.answers
        ]

    async def _search(self, run: BeamRun) -> None:
        try:
            step = 0
            while not is_over(run.beams, run.rules):
                found = await self._step(run, step)
                if found is None:
                    return
                run.beams = advance(run.beams, found, run.rules)
                step += 1
            run.reason = FinishReason.STOP if run.answers[0].ended else FinishReason.LENGTH
        except (EngineDeadError, RequestError):
            run.reason = FinishReason.ERROR
            raise
        finally:
            self._metrics.request_ended(run.record(time.monotonic()))

    async def _step(self, run: BeamRun, step: int) -> list[TokenLogprobs] | None:
        """The likeliest next tokens of each live beam; None: the search is to be aborted."""
        with ExitStack() as opened:
            streams = []
            for place, beam in enumerate(run.beams.live):
                (stream,) = self._engine.open(_next_token_of(beam, run, f"{step}.{place}"))
                opened.callback(stream.close)
                streams.append(stream)
            outputs = [await _only_output(stream) for stream in streams]
        if any(output.finish_reason is FinishReason.ABORT for output in outputs):
            return None
        self._observe(run, outputs[0])
        return [output.logprobs[0] for output in outputs]

    def _observe(self, run: BeamRun, output: RequestOutput) -> None:
        previous, run.last = run.last, output
        if run.first is None or previous is None:
            run.first = output
            self._metrics.first_token(time.monotonic() - run.request.arrival_seconds)
        elif output.last_token_seconds is not None and previous.last_token_seconds is not None:
            self._metrics.next_tokens(output.last_token_seconds - previous.last_token_seconds)

    def _answer(self, prepared: Prepared, beam: Beam, reason: FinishReason) -> Answer:
        text, tokenizer = prepared.text, self._tokenizer
        ids: Sequence[int] = beam.token_ids
        spelled = ids[:-1] if beam.ended and not text.include_stop else ids
        skip = tokenizer.special_ids if text.skip_special_tokens else frozenset()
        new_logprobs = prepared.shown.new_logprobs
        return Answer(
            decode(tokenizer.token_bytes, spelled, skip),
            Ending(reason.value),
            logprobs=None if new_logprobs is None else written(new_logprobs(), beam.entries),
            token_ids=ids if prepared.shown.token_ids else None,
        )


def _rules(request: AddRequest, options: BeamOptions) -> BeamRules:
    return BeamRules(
        width=options.width,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.params.max_tokens,
        end_ids=options.end_ids,
        length_penalty=options.length_penalty,
        num_shown=options.num_logprobs,
    )


def _next_token_of(beam: Beam, run: BeamRun, place: str) -> AddRequest:
    """Named as branches are, so that an abort of the response finds it."""
    request = run.request
    return msgspec.structs.replace(
        request,
        request_id=f"{place}_{request.request_id}",
        prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids],
        params=SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=run.rules.num_candidates,
        ),
    )


async def _only_output(stream: OutputStream) -> RequestOutput:
    output = await stream.next()
    while output.finish_reason is None:
        output = await stream.next()
    failure = given_up(output)
    if failure is not None:
        raise failure
    return output
