"""What the device keeps of sequences from one step to the next: block tables and last tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.types import ScheduledSequence

Ints = npt.NDArray[np.int32]

_FIRST_SLOTS, _FIRST_BLOCKS = 64, 32


class DeviceState:
    """Sole owner of a slot for each recent sequence: the blocks it has, and the token it drew last.

    A step names the blocks of its sequences; only what differs from the step before is written and
    sent to the device. The slot of a sequence that was in neither of the last two steps may go to
    another one; if it returns, all its blocks are written again.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._slots: OrderedDict[int, int] = (
            OrderedDict()
        )  # by sequence id, least recently used first
        self._used = [0] * _FIRST_SLOTS  # the step in which a slot was used last
        self._held: list[tuple[int, ...]] = [()] * _FIRST_SLOTS
        self._step = 0
        self._tables: Ints = np.zeros((_FIRST_SLOTS, _FIRST_BLOCKS), np.int32)
        self._on_device = self._sent()
        self._last_tokens = torch.zeros(_FIRST_SLOTS, dtype=torch.int32, device=device)

    def enter(self, sequences: Sequence[ScheduledSequence]) -> Ints:
        """Begin a step of these sequences: their slots [S], whose block tables are now those that
        the step names.
        """
        self._step += 1
        slots = [self._slot(sequence.seq_id) for sequence in sequences]
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for slot, sequence in zip(slots, sequences, strict=True):
            held, table = self._held[slot], tuple(sequence.block_table)
            if held == table:
                continue
            num_kept = len(held) if table[: len(held)] == held else 0
            rows += [slot] * (len(table) - num_kept)
            columns += range(num_kept, len(table))
            blocks += table[num_kept:]
            self._held[slot] = table
        if rows:
            self._write(rows, columns, blocks)
        return np.array(slots, np.int32)

    def blocks(self, slots: Ints, columns: Ints) -> Ints:
        """The blocks [n] at places `columns` [n] of the tables of `slots` [n], on the host."""
        return self._tables[slots, columns]

    def tables(self, slots: Tensor, width: int) -> Tensor:
        """The first `width` blocks [S, width] of the tables of `slots` [S], on the device. What is
        behind the end of a table means nothing.
        """
        return self._on_device[:, :width].index_select(0, slots)

    def remember(self, slots: Ints, tokens: Tensor) -> None:
        """The step has drawn tokens [n] for sequences in `slots` [n]; both on the device."""
        self._last_tokens[torch.from_numpy(slots).to(self.device)] = tokens.to(torch.int32)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """What the step before drew for sequences in `slots` [n]: int32 [n] on the device."""
        return self._last_tokens.index_select(0, slots)

    def last_token(self, seq_id: int) -> int:
        """What the step before drew for one sequence. Waits for the device."""
        return int(self._last_tokens[self._slots[seq_id]])

    def _slot(self, seq_id: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None:
            slot = self._free_slot()
            self._slots[seq_id] = slot
        self._slots.move_to_end(seq_id)
        self._used[slot] = self._step
        return slot

    def _free_slot(self) -> int:
        taken = len(self._slots)
        if taken == len(self._used):
            oldest, slot = next(iter(self._slots.items()))
            if self._used[slot] < self._step - 1:
                del self._slots[oldest]
                return slot
            self._used += [0] * taken
            self._held += [()] * taken
            self._grow(2 * taken, self._tables.shape[1])
        return taken

    def _write(self, rows: list[int], columns: list[int], blocks: list[int]) -> None:
        width = self._tables.shape[1]
        while width <= max(columns):
            width *= 2
        if width > self._tables.shape[1]:
            self._grow(len(self._tables), width)
        self._tables[rows, columns] = blocks
        if self.device.type != "cpu":
            places = torch.tensor([rows, columns, blocks], dtype=torch.int32).to(self.device)
            self._on_device[places[0], places[1]] = places[2]

    def _grow(self, num_slots: int, width: int) -> None:
        tables = np.zeros((num_slots, width), np.int32)
        tables[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
        self._tables = tables
        self._on_device = self._sent()
        more = self._last_tokens.new_zeros(num_slots - len(self._last_tokens))
        self._last_tokens = torch.cat([self._last_tokens, more])

    def _sent(self) -> Tensor:
        """The tables on the device; on a CPU the same memory."""
        return torch.from_numpy(self._tables).to(self.device)
