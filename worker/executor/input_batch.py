"""A step of plain ints turned into the tensors a model runs on, the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.models.llama import StepTensors
from worker.types import ScheduledSequence

Ints = npt.NDArray[np.int32]


class InputBatch:
    """One step's sequences in row order, and their tensors. Built once, read by the runner.

    The rows of `tensors.sample_rows` are: the last 1 + `num_drafts` ones of each of `sampled`, then
    one for each prompt target of each of `scored`, then the last one of each of `silent`, whose
    logits are not wanted. `slots` [T] are those of the tensors, on the host. No query attends to
    positions below `first_position`.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        block_size: int,
        device: torch.device,
        first_position: int = 0,
    ) -> None:
        self._device = device
        self.sequences = sequences
        self.sampled = [s for s in sequences if s.samples]
        self.scored = [s for s in sequences if s.prompt_targets]
        self.silent = [s for s in sequences if not s.samples]
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)
        counts = np.array([len(s.token_ids) for s in sequences], np.int32)
        starts = np.array([s.start for s in sequences], np.int32)
        query_starts = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        owners = np.repeat(np.arange(len(sequences), dtype=np.int32), counts)
        positions = np.arange(len(owners), dtype=np.int32) + (starts - query_starts[:-1])[owners]
        tables = block_tables(sequences, starts + counts, block_size)
        blocks = tables[owners, positions // block_size]
        self._ends = query_starts[1:].tolist()
        self.slots: Ints = blocks * block_size + positions % block_size
        self.tensors = StepTensors(
            token_ids=self._ints([token for s in sequences for token in s.token_ids]),
            positions=self._ints(positions),
            slots=self._ints(self.slots),
            query_starts=self._ints(query_starts),
            context_lens=self._ints(starts + counts),
            block_tables=self._ints(tables),
            sample_rows=self._ints(self._sample_rows()),
            first_position=first_position,
        )

    def _sample_rows(self) -> list[int]:
        ends = {s.seq_id: end for s, end in zip(self.sequences, self._ends, strict=True)}
        rows: list[int] = []
        for sequence in self.sampled:
            end = ends[sequence.seq_id]
            rows.extend(range(end - 1 - sequence.num_drafts, end))
        for sequence in self.scored:
            first = ends[sequence.seq_id] - len(sequence.token_ids)
            rows.extend(range(first, first + len(sequence.prompt_targets)))
        rows.extend(ends[sequence.seq_id] - 1 for sequence in self.silent)
        return rows

    def _ints(self, values: npt.ArrayLike) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(self._device)


def block_tables(sequences: Sequence[ScheduledSequence], ends: Ints, block_size: int) -> Ints:
    """The blocks [S, W] in which sequences have tokens after this step, which `ends` [S] count; 0
    where one has fewer than another.
    """
    counts = -(-ends // block_size)
    tables = np.zeros((len(sequences), counts.max(initial=0)), np.int32)
    for row, sequence, count in zip(tables, sequences, counts.tolist(), strict=True):
        row[:count] = sequence.block_table[:count]
    return tables
