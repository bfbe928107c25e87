"""The rounds of drafting: read, draft one token of each sequence, then one more in each round.

All sequences share a round's forward pass, and leave when they have their drafts or their logits
are not numbers. The last few rows before the drafts run with the first draft. All rows before these
are *catch-up*: a prompt, or tokens decoded while no drafts were requested.

Each step bounds its catch-up to twice its own tokens (or `MIN_ROWS`): the time after which a step
counts as hung follows from its tokens (see `engine.heartbeat`). The sequences with the fewest rows
to read go first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftNetwork, DraftRequest
from worker.executor.state import DeviceState, Ints
from worker.executor.step_batch import StepBatch
from worker.ops.draft import choose_drafts
from worker.types import SampleSpec, ScheduledSequence

MIN_ROWS = 64
MAX_ROWS = 2048  # beside any step: prompts are read only once drafts are known to pay
_ROWS_OF_A_STEP = 2  # for each token of it


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows to run for one request: positions `start` to `end` - 1, at `slots`.

    A complete span ends with the request's last token, which the target has not run yet.
    """

    request: DraftRequest
    start: int
    end: int
    slots: Ints
    is_complete: bool

    @property
    def known_slots(self) -> Ints:
        return self.slots[: len(self.slots) - self.is_complete]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The spans to read first, and the complete spans to run with the first draft."""

    behind: list[RowSpan]
    ready: list[RowSpan]


def most_rows(num_step_tokens: int) -> int:
    """Return the maximum number of rows of catch-up beside a step of `num_step_tokens` tokens."""
    return min(MAX_ROWS, max(MIN_ROWS, _ROWS_OF_A_STEP * num_step_tokens))


def plan_catch_up(
    cache: DraftCache, requests: Sequence[DraftRequest], first_position: int, max_rows: int
) -> CatchUp:
    """Plan the rows to run now, at most `max_rows` of them catch-up."""
    plan = CatchUp([], [])
    if not requests:
        return plan
    firsts = cache.first_unsynced(
        [request.block_table for request in requests],
        [request.position - 1 for request in requests],
        first_position,
    )
    for first, request in sorted(
        zip(firsts, requests, strict=True), key=lambda pair: pair[1].position - pair[0]
    ):
        # The rows of every round: accepted drafts, the token drawn behind them, the last token.
        start = max(first, request.position - (request.num_drafts + 2))
        end = min(start, first + max_rows)
        max_rows -= end - first
        if end > first:
            slots = cache.slots(request.block_table, first, end)
            plan.behind.append(RowSpan(request, first, end, slots, is_complete=False))
        if end == start < request.position:
            slots = cache.slots(request.block_table, start, request.position)
            plan.ready.append(RowSpan(request, start, request.position, slots, is_complete=True))
    return plan


@dataclass(slots=True)
class DraftedRun:
    """The drafts of one request; `is_sound` while its logits are numbers.

    `num_rows` rows, from its last token on, were run; `proposals` are the drafts' distributions.
    """

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    proposals: list[Tensor] = field(default_factory=list)
    num_rows: int = 0
    is_sound: bool = True


class DraftRounds:
    """One run of drafting with a network on its cache; used once."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: DraftCache,
        state: DeviceState,
        first_position: int,
        method: str,
    ) -> None:
        self._network = network
        self._cache = cache
        self._state = state
        self._first_position = first_position
        self._method = method
        self._lines: dict[int, DraftedRun] = {}

    @property
    def lines(self) -> list[DraftedRun]:
        """The drafts so far, even after an error in `run`."""
        return list(self._lines.values())

    def read(self, spans: Sequence[RowSpan]) -> set[int]:
        """Read incomplete `spans` and wait; return the sequences whose states are not numbers."""
        batch, known = self._begin(spans)
        states = self._network.run(self._recorded(batch), batch.tensors, self._cache.kv)
        # Every later row attends to a row that is not a number.
        rows = states[batch.tensors.query_starts[1:] - 1]
        sound = torch.isfinite(rows).all(dim=-1).tolist()
        failed = {s.seq_id for s, good in zip(batch.sequences, sound, strict=True) if not good}
        read = [s.known_slots for s in spans if s.request.seq_id not in failed]
        self._cache.mark(np.concatenate([known[:0], *read]), True)
        return failed

    def run(self, spans: Sequence[RowSpan], vocab_size: int) -> None:
        """Run complete `spans` and draft after them; rows of sound spans then count as synced."""
        lines = self._lines = {span.request.seq_id: DraftedRun(span.request) for span in spans}
        batch, known = self._begin(spans)
        hidden = self._round(batch, self._recorded(batch), vocab_size)
        read = [span.known_slots for span in spans if lines[span.request.seq_id].is_sound]
        self._cache.mark(np.concatenate([known[:0], *read]), True)
        while sequences := [_next_row(line) for line in lines.values() if _wants_more(line)]:
            places = {s.seq_id: place for place, s in enumerate(batch.sampled)}
            batch = self._batch(sequences)
            going_on = [places[sequence.seq_id] for sequence in sequences]
            features = hidden[going_on] if self._network.reads_states else None
            hidden = self._round(batch, features, vocab_size)

    def _begin(self, spans: Sequence[RowSpan]) -> tuple[StepBatch, Ints]:
        """Return the batch, and the slots that the target has run, which are now unsynced."""
        known = np.concatenate([span.known_slots for span in spans])
        self._cache.mark(known, False)
        token_ids = iter(self._cache.token_ids(known))
        sequences = []
        for span in spans:
            tokens = [next(token_ids) for _ in span.known_slots]
            if span.is_complete:
                tokens.append(span.request.last_token)
            sequences.append(_rows(span.request, tokens, span.start, span.is_complete))
        return self._batch(sequences), known

    def _batch(self, sequences: Sequence[ScheduledSequence]) -> StepBatch:
        return StepBatch(sequences, self._state, self._first_position)

    def _recorded(self, batch: StepBatch) -> Tensor | None:
        """Return the target's state before each row's position, if the network reads states."""
        if not self._network.reads_states:
            return None
        before = [
            self._cache.slots(s.block_table, s.start - 1, s.start - 1 + len(s.token_ids))
            for s in batch.sequences
        ]
        return self._cache.states(np.concatenate(before))

    def _round(self, batch: StepBatch, features: Tensor | None, vocab_size: int) -> Tensor:
        states = self._network.run(features, batch.tensors, self._cache.kv)
        hidden = states.index_select(0, batch.tensors.sample_rows[: batch.num_logits])
        if batch.sampled:
            self._choose([self._lines[s.seq_id] for s in batch.sampled], hidden, vocab_size)
        return hidden

    def _choose(self, lines: Sequence[DraftedRun], hidden: Tensor, vocab_size: int) -> None:
        logits = self._network.logits(hidden)
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        choice = choose_drafts(
            logits,
            [line.request.params for line in lines],
            [line.request.position + len(line.token_ids) for line in lines],
            self._method,
            # All sequences of a round have drafted equally often.
            len(lines[0].token_ids),
            self._network.draft_vocab,
            vocab_size,
        )
        drawn = _drawn(lines, choice.proposals)
        for place, line in enumerate(lines):
            line.num_rows += 1
            line.is_sound = finite[place]
            if not line.is_sound:
                continue
            line.token_ids.append(choice.token_ids[place])
            line.confidences.append(choice.confidences[place])
            if place in drawn:
                line.proposals.append(drawn[place])


def _drawn(lines: Sequence[DraftedRun], proposals: Tensor | None) -> dict[int, Tensor]:
    """Return q [V] of drawn drafts, by index in `lines`; greedy drafts need no memory for q."""
    if proposals is None:
        return {}
    places = [i for i, line in enumerate(lines) if line.request.params.temperature > 0]
    drawn = proposals if len(places) == len(lines) else proposals[places]
    return dict(zip(places, drawn, strict=True))


def _wants_more(line: DraftedRun) -> bool:
    return line.is_sound and len(line.token_ids) < line.request.num_drafts


def _next_row(line: DraftedRun) -> ScheduledSequence:
    position = line.request.position + len(line.token_ids) - 1
    return _rows(line.request, line.token_ids[-1:], position, draws=True)


def _rows(
    request: DraftRequest, token_ids: Sequence[int], start: int, draws: bool
) -> ScheduledSequence:
    samples = (SampleSpec(request.params, start + len(token_ids)),) if draws else ()
    return ScheduledSequence(request.seq_id, token_ids, start, request.block_table, samples)
