"""A response while it runs: its prompts and choices, and the collector of a whole answer."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from worker.api.generate.choice import Choice, Piece, joined
from worker.api.generate.frames import Answer, TokenCounts
from worker.api.generate.logprobs import (
    Columns,
    LogprobsWriter,
    TokenBytes,
    num_tokens_shown,
    prompt_logprobs,
    written,
)
from worker.api.generate.prepared import Prepared
from worker.api.schema.kv_transfer import kv_transfer_answer
from worker.engine.messages import AddRequest, RequestOutput
from worker.metrics.page import RequestRecord
from worker.tokenizer.tokenizer import Tokenizer
from worker.types import TokenLogprobs


@dataclass(slots=True)
class PromptRun:
    """A prompt and its choices. The first token, or an end, completes the `prompt_logprobs`."""

    request: AddRequest
    choices: list[Choice]
    echo: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_known: asyncio.Event = field(default_factory=asyncio.Event)
    records: list[RequestRecord] = field(default_factory=list)
    _echoed: Columns | None = None
    _raw_logprobs: msgspec.Raw | None = None

    def take(self, choice: Choice, output: RequestOutput) -> Piece:
        # Chunks of a long prompt bring them in parts.
        self.prompt_logprobs += output.prompt_logprobs
        has_begun = output.token_ids or output.finish_reason is not None
        if has_begun and choice is self.choices[0]:
            self.prompt_known.set()
        return choice.take(output)

    def record(self, choice: Choice, now: float) -> RequestRecord:
        record = choice.record(now)
        self.records.append(record)
        # The request's own figures belong to its last record alone.
        if len(self.records) < len(self.choices):
            return record
        longest = max(r.num_generation_tokens for r in self.records)
        return replace(record, n=len(self.choices), max_num_generation_tokens=longest)

    @property
    def num_tokens_shown(self) -> int:
        return num_tokens_shown(self.prompt_logprobs)

    def echoed(self, writer: LogprobsWriter) -> Columns | None:
        """Return the echoed prompt's log probabilities, known by now; None if it has no echo."""
        if self.echo is None:
            return None
        if self._echoed is None:
            ids = self.request.prompt_token_ids
            columns = writer.prompt(ids, self.echo, self.prompt_logprobs)
            self._echoed = Columns().followed_by(columns)
        writer.follow(self.echo)
        return self._echoed

    def raw_logprobs(self, num_likeliest: int, token_bytes: TokenBytes) -> msgspec.Raw:
        if self._raw_logprobs is None:
            size = len(self.request.prompt_token_ids)
            self._raw_logprobs = prompt_logprobs(
                self.prompt_logprobs, size, num_likeliest, token_bytes
            )
        return self._raw_logprobs


def prompt_runs(prepared: Prepared, tokenizer: Tokenizer) -> list[PromptRun]:
    """Return a run for each prompt. The indices of choices run over all prompts: prompt × n +
    answer. Raises `RequestError` for a resumed answer that is over already.
    """
    runs: list[PromptRun] = []
    index = itertools.count()
    for place, request in enumerate(prepared.requests):
        choices = []
        for _ in range(1 + len(request.branch_ids)):
            choice = Choice(next(index), request, prepared.text, tokenizer, prepared.form)
            choice.replay(request.output_token_ids)
            choices.append(choice)
        runs.append(
            PromptRun(request, choices, prepared.echoes[place] if prepared.echoes else None)
        )
    return runs


def usage_of(runs: Iterable[PromptRun], *, cached: bool) -> TokenCounts:
    runs = list(runs)
    return TokenCounts(
        prompt_tokens=sum(len(run.request.prompt_token_ids) for run in runs),
        completion_tokens=sum(c.num_generated for run in runs for c in run.choices),
        cached_tokens=sum(run.choices[0].num_cached for run in runs) if cached else None,
    )


def usage_so_far(run: PromptRun, choice: Choice, *, cached: bool) -> TokenCounts:
    return TokenCounts(
        len(run.request.prompt_token_ids),
        choice.num_generated,
        run.choices[0].num_cached if cached else None,
    )


def request_metrics(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Return vLLM's `metrics` block; `tokens_per_second` leaves out the first tokens."""
    choices = [choice for run in runs for choice in run.choices if choice.last is not None]
    arrival = min(run.request.arrival_seconds for run in runs)
    outputs = [choice.last for choice in choices if choice.last is not None]
    scheduled = [o.scheduled_seconds for o in outputs if o.scheduled_seconds is not None]
    firsts = [o.first_token_seconds for o in outputs if o.first_token_seconds is not None]
    lasts = [o.last_token_seconds for o in outputs if o.last_token_seconds is not None]
    generation = max(lasts) - min(firsts) if firsts and lasts else None
    # The first token ends the prefill; gaps begin behind it.
    later = sum(max(0, choice.num_generated - 1) for choice in choices)
    spans = sum(last - first for first, last in zip(firsts, lasts, strict=False))
    return {
        "time_to_first_token_ms": _milliseconds(min(firsts) - arrival if firsts else None),
        "generation_time_ms": _milliseconds(generation),
        "queue_time_ms": _milliseconds(min(scheduled) - arrival if scheduled else None),
        "mean_itl_ms": _milliseconds(spans / later if later else None),
        "tokens_per_second": later / generation if generation else None,
        "speculative_decoding": _speculative_decoding(choices),
    }


def _speculative_decoding(choices: Iterable[Choice]) -> dict[str, Any] | None:
    """Return vLLM's figures over all choices; None if no drafts were verified."""
    figures = [choice.speculation for choice in choices if choice.speculation is not None]
    steps = sum(one.num_steps for one in figures)
    if not steps:
        return None
    # Figures of several answers add up; rates are over the sums.
    drafted = sum(one.num_draft_tokens for one in figures)
    accepted = sum(one.num_accepted_tokens for one in figures)
    histogram = [
        sum(counts) for counts in zip(*(f.accepted_histogram for f in figures), strict=True)
    ]
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


class AnswerCollector:
    def __init__(self, prepared: Prepared, runs: Sequence[PromptRun]) -> None:
        self._shown = prepared.shown
        self._runs = runs
        self._pieces: dict[int, list[Piece]] = {c.index: [] for run in runs for c in run.choices}

    async def __call__(self, run: PromptRun, choice: Choice, piece: Piece) -> None:
        self._pieces[choice.index].append(piece)

    @property
    def num_tokens_shown(self) -> int:
        pieces = (piece for pieces in self._pieces.values() for piece in pieces)
        own = sum(num_tokens_shown(piece.logprobs) for piece in pieces)
        last = (choice.last for run in self._runs for choice in run.choices)
        own += sum(len(output.pooled) for output in last if output is not None)
        return own + sum(run.num_tokens_shown for run in self._runs)

    def answers(self, token_bytes: TokenBytes) -> list[Answer]:
        return [
            self._answer(run, choice, token_bytes) for run in self._runs for choice in run.choices
        ]

    def _answer(self, run: PromptRun, choice: Choice, token_bytes: TokenBytes) -> Answer:
        assert choice.ending is not None  # noqa: S101 (the caller's promise)
        piece, shown = joined(self._pieces[choice.index]), self._shown
        logprobs = None
        if shown.new_logprobs is not None:
            writer = shown.new_logprobs()
            logprobs = written(writer, piece.logprobs, run.echoed(writer))
        asked = shown.prompt_logprobs
        offer = None if choice.last is None else choice.last.kv_offer
        return Answer(
            text=(run.echo or "") + piece.text,
            ending=choice.ending,
            logprobs=logprobs,
            token_ids=piece.token_ids if shown.token_ids else None,
            prompt_logprobs=None if asked is None else run.raw_logprobs(asked, token_bytes),
            reasoning=piece.reasoning,
            calls=piece.calls,
            pooled=() if choice.last is None else choice.last.pooled,
            usage=usage_so_far(run, choice, cached=shown.cached_tokens),
            kv_transfer=None if offer is None else kv_transfer_answer(offer),
        )
