"""A step of plain ints turned into the tensors a model runs on.

Sequences are put in the order the attention plan wants: those that run one token, grouped by
context length, then those that run more. Everything that is the same for every layer (slots, block
gathers, masks) is made here, once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.models.layers import StepTensors
from worker.ops.paged_attention import (
    TILE_ROWS,
    AttentionPlan,
    Chunk,
    DecodeGroup,
    QueryTile,
    padded_context,
    padded_rows,
)
from worker.types import ScheduledSequence

_Ints = npt.NDArray[np.int64]

# A call of attention costs about as much as reading this many tokens of padding.
_CALL_COST_TOKENS = 256
# A call copies the keys and values of its sequences side by side, blocks they share once for each.
_GATHERED_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a layer's cache [num_blocks, 2, kv_heads, block_size, head_dim] is addressed.

    `padding_block` is always zero: it is read in the place of blocks that a sequence does not have.
    """

    block_size: int
    kv_heads: int
    padding_block: int = 0

    def planes(self, blocks: _Ints) -> _Ints:
        """Of blocks [B, n], the planes [B · 2 · kv_heads · n] of n blocks' head rows."""
        planes = np.arange(2 * self.kv_heads)[:, None]
        return (blocks[:, None] * (2 * self.kv_heads) + planes).ravel()

    def slots(self, blocks: _Ints, offsets: _Ints) -> _Ints:
        """Of tokens at offsets [T] in blocks [T], the rows [T · 2 · kv_heads] of their heads."""
        planes = self.planes(blocks[:, None]).reshape(len(blocks), -1)
        return (planes * self.block_size + offsets[:, None]).ravel()


class InputBatch:
    """One step's sequences in row order, and their tensors. Built once, read by the runner.

    `order` is the sequences in the order of their rows. The rows of `tensors.sample_rows` are: the
    last 1 + `num_drafts` ones of each of `sampled`, then one for each prompt target of each of
    `scored`, then the last one of each of `silent`, whose logits nobody wants.
    """

    def __init__(
        self,
        sequences: Sequence[ScheduledSequence],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._block_size = layout.block_size
        self._dtype = dtype
        self._device = device
        decodes = sorted((s for s in sequences if len(s.token_ids) == 1), key=lambda s: s.start)
        prompts = [s for s in sequences if len(s.token_ids) > 1]
        self.order = [*decodes, *prompts]
        plan = AttentionPlan(
            tuple(self._group(members) for members in _by_context(decodes)),
            tuple(self._chunk(sequence) for sequence in prompts),
        )
        self.sampled = [s for s in self.order if s.samples]
        self.scored = [s for s in self.order if s.prompt_targets]
        self.silent = [s for s in self.order if not s.samples]
        self.num_logits = sum(1 + s.num_drafts for s in self.sampled)
        self.num_logits += sum(len(s.prompt_targets) for s in self.scored)
        self.tensors = self._tensors(plan)

    def _tensors(self, plan: AttentionPlan) -> StepTensors:
        token_ids: list[int] = []
        positions: list[_Ints] = []
        slots: list[_Ints] = []
        ends: dict[int, int] = {}
        for sequence in self.order:
            token_ids.extend(sequence.token_ids)
            span = np.arange(sequence.start, sequence.start + len(sequence.token_ids))
            table = np.asarray(sequence.block_table, np.int64)
            positions.append(span)
            slots.append(
                self._layout.slots(table[span // self._block_size], span % self._block_size)
            )
            ends[sequence.seq_id] = len(token_ids)
        return StepTensors(
            token_ids=self._ints(np.asarray(token_ids, np.int64)),
            positions=self._ints(np.concatenate(positions)),
            slots=self._ints(np.concatenate(slots)),
            attention=plan,
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

    def _group(self, members: Sequence[ScheduledSequence]) -> DecodeGroup:
        """Decoding sequences padded to the longest of them."""
        context = padded_context(members[-1].start + 1, self._block_size)
        lengths = self._ints(np.array([[s.start + 1] for s in members], np.int64))
        mask = self._mask(torch.arange(context, device=self._device) >= lengths)
        blocks = np.stack([self._blocks(s, context) for s in members])
        planes = self._ints(self._layout.planes(blocks))
        return DecodeGroup(len(members), planes, mask[:, None, None])

    def _chunk(self, sequence: ScheduledSequence) -> Chunk:
        """A sequence's tokens cut into tiles of `TILE_ROWS` queries."""
        end = sequence.start + len(sequence.token_ids)
        tiles = tuple(
            self._tile(first, min(first + TILE_ROWS, end))
            for first in range(sequence.start, end, TILE_ROWS)
        )
        blocks = self._blocks(sequence, tiles[-1].mask.shape[-1])
        return Chunk(self._ints(self._layout.planes(blocks[None])), tiles)

    def _tile(self, first: int, last: int) -> QueryTile:
        """Queries at positions `first` to `last`-1; rows beyond them repeat the last one."""
        context = padded_context(last, self._block_size)
        rows = torch.arange(first, first + padded_rows(last - first), device=self._device)
        rows.clamp_(max=last - 1)
        mask = self._mask(torch.arange(context, device=self._device) > rows[:, None])
        return QueryTile(last - first, mask[None, None])

    def _blocks(self, sequence: ScheduledSequence, context: int) -> _Ints:
        """The blocks that hold the sequence's tokens, filled up to `context`: masked keys weigh
        zero, but zero times a nan is nan, so none is read that may hold anything.
        """
        blocks = np.full(context // self._block_size, self._layout.padding_block, np.int64)
        num_tokens = sequence.start + len(sequence.token_ids)
        used = sequence.block_table[: -(-num_tokens // self._block_size)]
        blocks[: len(used)] = used
        return blocks

    def _mask(self, hidden: Tensor) -> Tensor:
        """-inf where hidden, else 0, to be added to scores."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _ints(self, values: _Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _by_context(decodes: Sequence[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    """Sequences in ascending context, cut where padding would cost more than another call."""
    groups: list[list[ScheduledSequence]] = []
    padding = 0
    for sequence in decodes:
        if groups:
            padding += len(groups[-1]) * (sequence.start - groups[-1][-1].start)
        full = bool(groups) and (len(groups[-1]) + 1) * sequence.start > _GATHERED_TOKENS
        if not groups or full or padding > _CALL_COST_TOKENS:
            groups.append([])
            padding = 0
        groups[-1].append(sequence)
    return groups
