"""A step of plain ints as the arrays that a model runs on, the same for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from worker.executor.state import DeviceState, Ints
from worker.models.llama import StepTensors
from worker.ops.step import StepAdapters, sent
from worker.types import ScheduledSequence


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Sequences that each have one row and draw from it, with their slots in the state: the part of
    a `StepBatch` that answers depend on.
    """

    sampled: Sequence[ScheduledSequence]
    sampled_slots: Ints
    scored: Sequence[ScheduledSequence] = ()
    silent: Sequence[ScheduledSequence] = ()
    pooled: Sequence[ScheduledSequence] = ()


class StepBatch:
    """One step's sequences in row order, entered in `state`, and their tensors.

    The rows of `tensors.sample_rows` are: the last 1 + `num_drafts` rows of each of `sampled`, then
    one row for each prompt target of each of `scored`, then the last row of each of `silent`, whose
    logits are not needed, then the last `num_pooled` rows of each of `pooled`. `slots` [T] are the
    slots of the tensors, on the host; `sampled_slots` are the state's slots of `sampled`. Queries
    attend to no position below `first_position`; the rows have these `adapters`.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        state: DeviceState,
        first_position: int = 0,
        adapters: StepAdapters | None = None,
    ) -> None:
        self.sequences = sequences
        places = [i for i, s in enumerate(sequences) if s.samples]
        self.sampled = [sequences[i] for i in places]
        self.scored = [s for s in sequences if s.prompt_targets]
        self.silent = [s for s in sequences if not s.samples]
        self.pooled = [s for s in sequences if s.num_pooled]
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)
        count, size = len(sequences), state.block_size
        counts = [s.num_tokens for s in sequences]
        ends = [*accumulate(counts)]
        entered = state.enter(sequences)
        lengths, query_starts = np.array(counts, np.int32), np.zeros(count + 1, np.int32)
        query_starts[1:] = ends
        starts = np.array([s.start for s in sequences], np.int32)
        contexts = starts + lengths
        owners = np.repeat(np.arange(count, dtype=np.int32), lengths)
        positions = np.arange(len(owners), dtype=np.int32) + (starts - query_starts[:-1])[owners]
        blocks = state.blocks(entered[owners], positions // size)
        self.slots: Ints = blocks * size + positions % size
        self.sampled_slots: Ints = entered[places]
        pending = [i for i, s in enumerate(sequences) if s.takes_pending]
        # One copy brings all of them to the device.
        parts = [
            np.array(_token_ids(sequences), np.int32),
            *(positions, self.slots, query_starts, contexts),
            np.array(self._sample_rows(ends), np.int32),
            *(entered, query_starts[1:][pending] - 1, entered[pending]),
        ]
        packed = sent(np.concatenate(parts), state.device)
        token_ids, position, slots, query_start, context, sample_rows, own, rows, of = torch.split(
            packed, [len(part) for part in parts]
        )
        if pending:
            token_ids[rows] = state.last_tokens(of)
        longest = int(contexts.max(initial=0))
        tables = state.tables(own, -(-longest // size))
        self.tensors = StepTensors(
            *(token_ids, position, slots, query_start, context, tables, sample_rows),
            *(max(counts, default=0), longest, first_position),
            adapters=adapters,
        )

    def _sample_rows(self, ends: Sequence[int]) -> list[int]:
        sampled: list[int] = []
        scored: list[int] = []
        silent: list[int] = []
        pooled: list[int] = []
        for sequence, end in zip(self.sequences, ends, strict=True):
            if sequence.samples:
                sampled += range(end - 1 - sequence.num_drafts, end)
            else:
                silent.append(end - 1)
            if sequence.prompt_targets:
                first = end - sequence.num_tokens
                scored += range(first, first + len(sequence.prompt_targets))
            pooled += range(end - sequence.num_pooled, end)
        return [*sampled, *scored, *silent, *pooled]


def _token_ids(sequences: Sequence[ScheduledSequence]) -> list[int]:
    """Return the tokens of all rows, 0 for pending ones."""
    tokens: list[int] = []
    for sequence in sequences:
        tokens += sequence.token_ids
        if sequence.takes_pending:
            tokens.append(0)
    return tokens
