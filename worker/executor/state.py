"""The state of sequences on the device from one step to the next: block tables and last tokens."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.step import sent
from worker.types import BlockTable, ScheduledSequence

Ints = npt.NDArray[np.int32]

_FIRST_SLOTS, _FIRST_BLOCKS = 64, 32


class DeviceState:
    """Sole owner of a slot for each recent sequence: its blocks, the token it drew last, and, in
    `drafted` [slots, 2 + `most_drafts`] int32 on the device, that token's position, the number of
    drafts behind it, and the drafts.

    Only differences from the previous step are sent to the device. A sequence that was in neither
    of the last two steps may lose its slot; if it returns, all its blocks are written again. Slot 0
    belongs to no sequence. The initial `room` in slots, and in blocks of a sequence, can grow.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        room: tuple[int, int] | None = None,
        most_drafts: int = 0,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self._is_shared = device.type == "cpu" and room is None
        num_slots, width = room or (_FIRST_SLOTS, _FIRST_BLOCKS)
        self._slots: OrderedDict[int, int] = (
            OrderedDict()
        )  # by sequence id, least recently used first
        self._used = [0] * num_slots  # the last step that used each slot
        self._held: list[tuple[int, ...]] = [()] * num_slots
        self._step = 0
        self._entered, self._places = list[int](), np.zeros(0, np.int32)  # the last step's
        self._tables: Ints = np.zeros((num_slots, width), np.int32)
        self.device_tables = self._sent(self._tables)
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.drafted = self._last_tokens.new_zeros(num_slots, 2 + most_drafts)

    def enter(self, sequences: Sequence[ScheduledSequence]) -> Ints:
        """Begin a step; return the sequences' slots [S], with the tables of the step."""
        slots, changes, _ = self.enter_quietly(sequences)
        if changes.size and not self._is_shared:
            self.send(changes)
        return slots

    def enter_quietly(
        self, sequences: Sequence[ScheduledSequence]
    ) -> tuple[Ints, Ints, Collection[int]]:
        """Begin a step as `enter` does, but leave the changes of the tables (slots, indices and
        blocks [3, n]) to the caller. `device_tables` that had to grow contain the changes already.
        The last value has the indices of sequences that have another block below their start.
        """
        self._step += 1
        ids = [sequence.seq_id for sequence in sequences]
        if ids != self._entered:  # most steps have the sequences of the one before
            self._places = np.array([self._slot(seq_id) for seq_id in ids], np.int32)
            self._entered = ids
        changes: list[int] = []
        moved: list[int] = []
        held, used = self._held, self._used
        for index, slot in enumerate(self._places.tolist()):
            used[slot] = self._step
            table, before = sequences[index].block_table, held[slot]
            if table is before:
                continue
            if isinstance(table, BlockTable) and table.before is before:
                num_equal = table.num_same  # a comparison takes time
            else:
                table = table if isinstance(table, tuple) else tuple(table)
                num_equal = _num_equal(before, table)
            for place in range(num_equal, len(table)):
                changes += (slot, place, table[place])
            held[slot] = table
            if num_equal * self.block_size < sequences[index].start:
                moved.append(index)
        packed = np.array(changes, np.int32).reshape(-1, 3).T
        if changes:
            self._write(packed)
        return self._places, packed, moved

    def send(self, changes: Ints) -> None:
        rows, columns, blocks = sent(changes.copy(), self.device)
        self.device_tables[rows, columns] = blocks

    def blocks(self, slots: Ints, columns: Ints) -> Ints:
        """Return the blocks [n] at `columns` [n] of the tables of `slots` [n], on the host."""
        return self._tables[slots, columns]

    def tables(self, slots: Tensor, width: int) -> Tensor:
        """Return the first `width` blocks [S, width] of the tables of `slots` [S], on the device.
        Entries after the end of a table are undefined.
        """
        return self.device_tables[:, :width].index_select(0, slots)

    def remember(self, slots: Ints, tokens: Tensor) -> None:
        """Store tokens [n] that the step drew for sequences in `slots` [n]; both on the device."""
        self.keep(sent(slots, self.device), tokens)

    def keep(self, slots: Tensor, tokens: Tensor) -> None:
        """Store tokens as `remember` does, for `slots` [n] on the device."""
        self._last_tokens[slots] = tokens.to(torch.int32)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """Return the previous step's draws for `slots` [n]: int32 [n] on the device."""
        return self._last_tokens.index_select(0, slots)

    def last_token(self, seq_id: int) -> int:
        """Return the previous step's draw for one sequence. Waits for the device."""
        return int(self._last_tokens[self._slots[seq_id]])

    def forget(self) -> None:
        """Free all slots, after a step whose changes may not have reached the device."""
        self._slots.clear()
        self._entered, self._places = [], self._places[:0]
        self._held = [()] * len(self._held)

    def _slot(self, seq_id: int) -> int:
        slot = self._slots.get(seq_id)
        if slot is None:
            slot = self._free_slot()
            self._slots[seq_id] = slot
        self._slots.move_to_end(seq_id)
        self._used[slot] = self._step
        return slot

    def _free_slot(self) -> int:
        taken = len(self._slots) + 1
        if taken == len(self._used):
            oldest, slot = next(iter(self._slots.items()))
            # The step before may still read its slots, and the next one takes tokens from them.
            if self._used[slot] < self._step - 1:
                del self._slots[oldest]
                return slot
            self._grow(2 * taken)
            self._used += [0] * taken
            self._held += [()] * taken
        return taken

    def _write(self, changes: Ints) -> None:
        rows, columns, blocks = changes
        width, needed = self._tables.shape[1], int(columns.max())
        while width <= needed:
            width *= 2
        if width == self._tables.shape[1]:
            self._tables[rows, columns] = blocks
            return
        tables = self._grown(len(self._tables), width)
        tables[rows, columns] = blocks
        self.device_tables, self._tables = self._sent(tables), tables

    def _grown(self, num_slots: int, width: int) -> Ints:
        tables = np.zeros((num_slots, width), np.int32)
        tables[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
        return tables

    def _grow(self, num_slots: int) -> None:
        tables = self._grown(num_slots, self._tables.shape[1])
        more = self.drafted.new_zeros(num_slots - len(self.drafted), self.drafted.shape[1])
        self.drafted = torch.cat([self.drafted, more])
        last_tokens, there = torch.cat([self._last_tokens, more[:, 0]]), self._sent(tables)
        self._last_tokens, self.device_tables, self._tables = last_tokens, there, tables

    def _sent(self, tables: Ints) -> Tensor:
        """Return `tables` on the device; a CPU shares their memory, except with graphs."""
        there = torch.from_numpy(tables)
        return there if self._is_shared else there.to(self.device, copy=True)


def _num_equal(held: tuple[int, ...], table: tuple[int, ...]) -> int:
    """Return the length of the common beginning; most often one contains the other."""
    shorter = min(len(held), len(table))
    if held[:shorter] == table[:shorter]:
        return shorter
    return next(i for i, (one, other) in enumerate(zip(held, table, strict=False)) if one != other)
