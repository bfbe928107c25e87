"""The cache of a drafter: per-token data in the same blocks as the target's keys and values.

The scheduler allocates blocks without regard to drafters. A block here holds the ids of its tokens
and (for a head) the target's states, written whenever the target runs the tokens, and the drafter's
own keys and values, computed when it needs them; `is_synced` marks tokens that have these. So:

 * For every position that the target has run, ids and states belong to the sequence. (Where it has
   loaded keys and values instead, ids do, and the states are zeros.)
 * Where a position and all earlier ones are synced, keys and values follow from ids and states.

A drafter reads a sequence from the first unsynced position on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.executor.kv_cache import allocate, copy_blocks, zeros
from worker.executor.state import Ints
from worker.models.config import ModelConfig
from worker.models.llama import StepTensors


def bytes_per_token(
    model: ModelConfig, state_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> int:
    kv = model.kv_elements_per_token * kv_dtype.itemsize
    return kv + state_size * dtype.itemsize + torch.int32.itemsize + torch.bool.itemsize


class DraftCache:
    """Sole owner of these tensors; slot = block · block_size + offset, as in the target's cache.

    `kv` is [layers, num_blocks, 2, kv_heads, block_size, head_dim]; `state_size` 0: no states.
    """

    def __init__(
        self,
        model: ModelConfig,
        state_size: int,
        blocks: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of the states, and of `kv` unless `kv_dtype` is given."""
        num_blocks, self.block_size = blocks
        self._device = device
        self.kv = allocate(num_blocks, self.block_size, model, kv_dtype or dtype, device)
        num_slots = num_blocks * self.block_size
        self._token_ids = zeros((num_slots,), torch.int32, device)
        self._is_synced = zeros((num_slots,), torch.bool, device)
        self._states = zeros((num_slots, state_size), dtype, device) if state_size else None

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); all are read before any is written."""
        copy_blocks(self.kv, tuple(copies))
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._device)
        for stored in (self._token_ids, self._is_synced, self._states):
            if stored is not None:
                blocks = stored.view(-1, self.block_size, *stored.shape[1:])
                blocks[pairs[:, 1]] = blocks[pairs[:, 0]]

    def record(self, step: StepTensors, states: Tensor | None) -> None:
        """Store the ids of a step that the target has run, and its states [T, state_size]."""
        places = step.slots.long()
        self._token_ids.index_copy_(0, places, step.token_ids)
        self._is_synced.index_fill_(0, places, False)
        if self._states is not None and states is not None:
            self._states.index_copy_(0, places, states)

    def load(self, slots: Ints, token_ids: Sequence[int]) -> None:
        """Store the ids of tokens whose keys and values the target has taken from elsewhere. Their
        states are unknown; a head reads zeros in their place.
        """
        places = self._ints(slots)
        ids = torch.tensor(token_ids, dtype=torch.int32, device=self._device)
        self._token_ids.index_copy_(0, places, ids)
        self._is_synced.index_fill_(0, places, False)
        if self._states is not None:
            self._states.index_fill_(0, places, 0)

    def mark(self, slots: Ints, is_synced: bool) -> None:
        if len(slots):
            self._is_synced.index_fill_(0, self._ints(slots), is_synced)

    def first_unsynced(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], first_position: int
    ) -> list[int]:
        """Return each sequence's first unsynced position from `first_position`, or its length."""
        size = self.block_size
        counts = [-(-length // size) for length in lengths]
        blocks = np.zeros((len(tables), max(counts, default=0)), np.int32)
        for row, (table, count) in zip(blocks, zip(tables, counts, strict=True), strict=True):
            row[:count] = table[:count]
        synced = self._is_synced.view(-1, size)[self._ints(blocks)].flatten(1)
        positions = torch.arange(synced.shape[1], device=self._device)
        ends = torch.tensor(lengths, device=self._device)[:, None]
        is_passed = synced | (positions < first_position) | (positions >= ends)
        firsts: list[int] = torch.where(is_passed, ends, positions).amin(dim=1).tolist()
        return [max(first, first_position) for first in firsts]

    def token_ids(self, slots: Ints) -> list[int]:
        found: list[int] = self._token_ids[self._ints(slots)].tolist()
        return found

    def states(self, slots: Ints) -> Tensor | None:
        """Return the target's states [n, state_size] at slots [n]; None without states."""
        return self.states_at(self._ints(slots))

    def tokens_at(self, slots: Tensor) -> Tensor:
        """Return the ids [n] int32 at slots [n], on the device."""
        return self._token_ids.index_select(0, slots)

    def states_at(self, slots: Tensor) -> Tensor | None:
        """Return the target's states as `states` does, for slots [n] on the device."""
        return None if self._states is None else self._states.index_select(0, slots)

    def mark_at(self, slots: Tensor, are_synced: Tensor) -> None:
        """Mark slots [n] on the device by the values [n]; slots that repeat get any of theirs."""
        self._is_synced.index_copy_(0, slots.long(), are_synced)

    def slots(self, table: Sequence[int], first: int, last: int) -> Ints:
        """Return the slots of positions `first` to `last` - 1 of a sequence."""
        size = self.block_size
        positions = np.arange(first, last, dtype=np.int32)
        home = first // size
        blocks = np.asarray(table[home : -(-last // size)], np.int32)
        found: Ints = blocks[positions // size - home] * size + positions % size
        return found

    def _ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device, torch.int64)
