"""A step of plain ints turned into the tensors a model runs on.

Sequences are put in the order the attention plan wants (see `attention_planning`). Everything that
is the same for every layer (slots, block gathers, masks) is made here, once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.executor.attention_planning import (
    AttentionPlanner,
    CacheLayout,
    Ints,
    group_sequences,
)
from worker.models.layers import StepTensors
from worker.types import ScheduledSequence

__all__ = ["CacheLayout", "InputBatch"]


class InputBatch:
    """One step's sequences in row order, and their tensors. Built once, read by the runner.

    `order` is the sequences in the order of their rows. The rows of `tensors.sample_rows` are: the
    last 1 + `num_drafts` ones of each of `sampled`, then one for each prompt target of each of
    `scored`, then the last one of each of `silent`, whose logits nobody wants. `token_slots` [T]
    are the rows' places in the cache: block · block_size + offset.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        order = group_sequences(sequences, layout.sharing)
        self.order = order.sequences
        self.sampled = [s for s in self.order if s.samples]
        self.scored = [s for s in self.order if s.prompt_targets]
        self.silent = [s for s in self.order if not s.samples]
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)
        token_ids: list[int] = []
        positions: list[Ints] = []
        blocks: list[Ints] = []
        ends: dict[int, int] = {}
        for sequence in self.order:
            token_ids.extend(sequence.token_ids)
            span = np.arange(sequence.start, sequence.start + len(sequence.token_ids))
            positions.append(span)
            table = np.asarray(sequence.block_table, np.int64)
            blocks.append(table[span // layout.block_size])
            ends[sequence.seq_id] = len(token_ids)
        places = np.concatenate(positions)
        homes, offsets = np.concatenate(blocks), places % layout.block_size
        self.token_slots = homes * layout.block_size + offsets
        self.tensors = StepTensors(
            token_ids=self._ints(np.asarray(token_ids, np.int64)),
            positions=self._ints(places),
            slots=self._ints(layout.slots(homes, offsets)),
            attention=AttentionPlanner(layout, dtype, device).plan(order),
            sample_rows=self._ints(np.asarray(self._sample_rows(ends), np.int64)),
        )

    def _sample_rows(self, ends: dict[int, int]) -> list[int]:
        """`ends` says after which row each sequence ends."""
        rows: list[int] = []
        for sequence in self.sampled:
            end = ends[sequence.seq_id]
            rows.extend(range(end - 1 - sequence.num_drafts, end))
        for sequence in self.scored:
            first = ends[sequence.seq_id] - len(sequence.token_ids)
            rows.extend(range(first, first + len(sequence.prompt_targets)))
        rows.extend(ends[sequence.seq_id] - 1 for sequence in self.silent)
        return rows

    def _ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)
