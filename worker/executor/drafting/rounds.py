"""The rounds of drafting: read, draft one token of each sequence, then one more each round.

All sequences share a round's forward pass. One leaves when it has as many drafts as were asked for,
or when its logits are not numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worker.executor.attention_planning import CacheLayout, Ints
from worker.executor.drafting.catch_up import Span
from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftNetwork, DraftRequest
from worker.executor.input_batch import InputBatch
from worker.ops.draft import choose_drafts
from worker.types import SampleSpec, ScheduledSequence


@dataclass(slots=True)
class Line:
    """What was drafted for one request; `is_sound` while its logits are numbers.

    `num_rows` rows from the request's last token on have been run; `proposals` are what the drafts
    were drawn from, if they were.
    """

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    proposals: list[Tensor] = field(default_factory=list)
    num_rows: int = 0
    is_sound: bool = True


class Rounds:
    """One run of drafting with a network on its cache; used once."""

    def __init__(
        self, network: DraftNetwork, cache: DraftCache, layout: CacheLayout, method: str
    ) -> None:
        self._network = network
        self._cache = cache
        self._layout = layout
        self._method = method
        self._lines: dict[int, Line] = {}

    @property
    def lines(self) -> list[Line]:
        """What has been drafted, also if `run` raised."""
        return list(self._lines.values())

    def read(self, spans: Sequence[Span]) -> set[int]:
        """Read `spans`, of which none is complete; the device has done it when this returns. Gives
        the sequences that came to what is no number, whose rows do not count as synced.
        """
        batch, known = self._begin(spans)
        states = self._network.run(self._recorded(batch), batch.tensors, self._cache.kv)
        # What is no number in any row is seen by all after it.
        lasts = np.cumsum([len(sequence.token_ids) for sequence in batch.order]) - 1
        rows = states[torch.from_numpy(lasts).to(states.device)]
        sound = torch.isfinite(rows).all(dim=-1).tolist()
        failed = {s.seq_id for s, good in zip(batch.order, sound, strict=True) if not good}
        read = [s.known_slots for s in spans if s.request.seq_id not in failed]
        self._cache.mark(np.concatenate([known[:0], *read]), True)
        return failed

    def run(self, spans: Sequence[Span], vocab_size: int) -> None:
        """Run `spans`, all complete, and draft behind them, as ids below `vocab_size`. What was
        read counts as synced only once it was read to the end, and well.
        """
        lines = self._lines = {span.request.seq_id: Line(span.request) for span in spans}
        batch, known = self._begin(spans)
        hidden = self._round(batch, self._recorded(batch), vocab_size)
        read = [span.known_slots for span in spans if lines[span.request.seq_id].is_sound]
        self._cache.mark(np.concatenate([known[:0], *read]), True)
        while sequences := [_next_row(line) for line in lines.values() if _wants_more(line)]:
            places = {s.seq_id: place for place, s in enumerate(batch.sampled)}
            batch = self._batch(sequences)
            order = [places[sequence.seq_id] for sequence in batch.order]
            features = hidden[order] if self._network.reads_states else None
            hidden = self._round(batch, features, vocab_size)

    def _begin(self, spans: Sequence[Span]) -> tuple[InputBatch, Ints]:
        """The rows of `spans`, and the slots of those that the target has run, not synced now."""
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

    def _batch(self, sequences: Sequence[ScheduledSequence]) -> InputBatch:
        kv = self._cache.kv
        return InputBatch(sequences, self._layout, kv.dtype, kv.device)

    def _recorded(self, batch: InputBatch) -> Tensor | None:
        """What the target made of the positions before the rows of `batch`, if it is read."""
        if not self._network.reads_states:
            return None
        before = [
            self._cache.slots(s.block_table, s.start - 1, s.start - 1 + len(s.token_ids))
            for s in batch.order
        ]
        return self._cache.states(np.concatenate(before))

    def _round(self, batch: InputBatch, features: Tensor | None, vocab_size: int) -> Tensor:
        """Run the rows of `batch` and draft after those of its `sampled`, whose hidden states
        [len(sampled), hidden] it returns.
        """
        states = self._network.run(features, batch.tensors, self._cache.kv)
        hidden = states.index_select(0, batch.tensors.sample_rows[: batch.num_logits])
        if batch.sampled:
            self._choose([self._lines[s.seq_id] for s in batch.sampled], hidden, vocab_size)
        return hidden

    def _choose(self, lines: Sequence[Line], hidden: Tensor, vocab_size: int) -> None:
        """One more draft for each of `lines`, whose rows `hidden` are."""
        logits = self._network.logits(hidden)
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        choice = choose_drafts(
            logits,
            [line.request.params for line in lines],
            [line.request.position + len(line.token_ids) for line in lines],
            self._method,
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


def _drawn(lines: Sequence[Line], proposals: Tensor | None) -> dict[int, Tensor]:
    """By place in `lines`, q [V] that a draft was drawn from. Greedy drafts are judged without, and
    take no memory for it.
    """
    if proposals is None:
        return {}
    places = [i for i, line in enumerate(lines) if line.request.params.temperature > 0]
    kept = proposals if len(places) == len(lines) else proposals[places]
    return dict(zip(places, kept, strict=True))


def _wants_more(line: Line) -> bool:
    return line.is_sound and len(line.token_ids) < line.request.num_drafts


def _next_row(line: Line) -> ScheduledSequence:
    """Its last draft, to be run as if it were known."""
    position = line.request.position + len(line.token_ids) - 1
    return _rows(line.request, line.token_ids[-1:], position, draws=True)


def _rows(
    request: DraftRequest, token_ids: Sequence[int], start: int, draws: bool
) -> ScheduledSequence:
    samples = (SampleSpec(request.params, start + len(token_ids)),) if draws else ()
    return ScheduledSequence(request.seq_id, token_ids, start, request.block_table, samples)
