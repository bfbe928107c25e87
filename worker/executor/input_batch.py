"""A step of plain ints turned into the tensors a model runs on.

Sequences are put in the order the attention plan wants. Everything that
is the same for every layer (slots, block gathers, masks) is made here, once a step.

How the sequences of a step share calls of attention.

Three kinds of work (see `ops.paged_attention`): sequences that run one token, grouped by context
length; sequences that run a few (drafts to verify, ends of prompts), grouped by their number and
context; and longer chunks, one by one. A group is padded to its longest and largest member, and cut
where padding would cost more than another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.llama import StepTensors
from worker.ops.paged_attention import (
    TILE_ROWS,
    AttentionPlan,
    Chunk,
    DecodeGroup,
    QueryTile,
    SpanGroup,
    padded_context,
    padded_rows,
)
from worker.types import ScheduledSequence

Ints = npt.NDArray[np.int64]

# Sequences that run more tokens than this share no call: theirs are busy enough alone.
_SPAN_TOKENS = 32
# A call of attention costs about as much as this much padding, in pairs of a query and a key it
# reads; of a lone query the rows that make up `MIN_ROWS` double the work.
_CALL_COST_PAIRS = 512
_DECODE_CALL_COST_PAIRS = 256
# A call copies the keys and values of its sequences side by side, blocks they share once for each.
_GATHERED_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a layer's cache [num_blocks, 2, kv_heads, block_size, head_dim] is addressed and read.

    `padding_block` is always zero: it is read in the place of blocks that a sequence does not have.
    `sharing` query heads read each KV head. No query attends to positions below `first_position`.
    """

    block_size: int
    kv_heads: int
    padding_block: int = 0
    first_position: int = 0
    sharing: int = field(kw_only=True)

    @classmethod
    def of(cls, model: ModelConfig, num_blocks: int, block_size: int) -> CacheLayout:
        """The layout of a cache of `num_blocks` blocks for `model`, the last one for padding."""
        sharing = model.num_heads // model.num_kv_heads
        return cls(block_size, model.num_kv_heads, num_blocks - 1, sharing=sharing)

    def planes(self, blocks: Ints) -> Ints:
        """Of blocks [B, n], the planes [B · 2 · kv_heads · n] of n blocks' head rows."""
        planes = np.arange(2 * self.kv_heads)[:, None]
        return (blocks[:, None] * (2 * self.kv_heads) + planes).ravel()

    def slots(self, blocks: Ints, offsets: Ints) -> Ints:
        """Of tokens at offsets [T] in blocks [T], the rows [T · 2 · kv_heads] of their heads."""
        planes = self.planes(blocks[:, None]).reshape(len(blocks), -1)
        return (planes * self.block_size + offsets[:, None]).ravel()


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step's sequences in the groups that attend together, in the order of their rows."""

    decodes: list[list[ScheduledSequence]]
    spans: list[list[ScheduledSequence]]
    chunks: list[ScheduledSequence]

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """All of them, flat."""
        groups = [*self.decodes, *self.spans, self.chunks]
        return [sequence for group in groups for sequence in group]


def group_sequences(sequences: Sequence[ScheduledSequence], sharing: int) -> StepOrder:
    """Sort sequences into kinds of work and groups, for heads of which `sharing` share a KV head.

    A span's queries times `sharing` are rows of one product, which has at most `TILE_ROWS`.
    """
    limit = min(_SPAN_TOKENS, TILE_ROWS // sharing)
    decodes = sorted((s for s in sequences if len(s.token_ids) == 1), key=_end)
    spans = [s for s in sequences if 1 < len(s.token_ids) <= limit]
    spans.sort(key=lambda s: (len(s.token_ids), _end(s)))
    chunks = [s for s in sequences if len(s.token_ids) > max(limit, 1)]
    return StepOrder(_cut(decodes, _DECODE_CALL_COST_PAIRS), _cut(spans, _CALL_COST_PAIRS), chunks)


def _end(sequence: ScheduledSequence) -> int:
    """Tokens that the sequence's last query attends to."""
    return sequence.start + len(sequence.token_ids)


def _cut(sequences: Sequence[ScheduledSequence], call_cost: int) -> list[list[ScheduledSequence]]:
    """Consecutive groups, each as long as its padding costs at most a call and its copies fit;
    `sequences` in ascending number of tokens.
    """
    groups: list[list[ScheduledSequence]] = []
    longest = pairs = 0
    for sequence in sequences:
        queries, end = len(sequence.token_ids), _end(sequence)
        keys = (len(groups[-1]) + 1) * max(longest, end) if groups else 0
        padding = keys * queries - pairs - end * queries
        if not groups or keys > _GATHERED_TOKENS or padding > call_cost:
            groups.append([])
            longest = pairs = 0
        groups[-1].append(sequence)
        longest = max(longest, end)
        pairs += end * queries
    return groups


class AttentionPlanner:
    """Makes the tensors of attention plans: gathers and masks, the same for every layer."""

    def __init__(self, layout: CacheLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._block_size = layout.block_size
        self._dtype = dtype
        self._device = device

    def plan(self, order: StepOrder) -> AttentionPlan:
        """The plan of a step whose rows are those of `order`."""
        return AttentionPlan(
            tuple(self._decode_group(members) for members in order.decodes),
            tuple(self._span_group(members) for members in order.spans),
            tuple(self._chunk(sequence) for sequence in order.chunks),
        )

    def _decode_group(self, members: Sequence[ScheduledSequence]) -> DecodeGroup:
        """Decoding sequences padded to the longest of them, which comes last."""
        context = padded_context(_end(members[-1]), self._block_size)
        positions = self._ints(np.array([[s.start] for s in members], np.int64))
        mask = self._mask(positions, context)
        return DecodeGroup(len(members), self._planes(members, context), mask[:, None])

    def _span_group(self, members: Sequence[ScheduledSequence]) -> SpanGroup:
        """Members padded to the longest context among them, and to the most queries by repeating
        a member's last one.
        """
        counts = np.array([len(s.token_ids) for s in members], np.int64)
        num_queries = int(counts.max())
        context = padded_context(max(_end(s) for s in members), self._block_size)
        queries = np.minimum(np.arange(num_queries), counts[:, None] - 1)
        rows = np.repeat(queries, self._layout.sharing, axis=1)
        surplus = padded_rows(rows.shape[1], self._layout.kv_heads) - rows.shape[1]
        rows = np.concatenate([rows, rows[:, :surplus]], axis=1)
        starts = np.array([[s.start] for s in members], np.int64)
        mask = self._mask(self._ints(starts + rows), context)
        fill = take = None
        if counts.min() < num_queries:
            firsts = np.cumsum(counts) - counts
            fill = self._ints((firsts[:, None] + queries).ravel())
            take = self._ints(np.flatnonzero(np.arange(num_queries) < counts[:, None]))
        planes = self._planes(members, context)
        return SpanGroup(len(members), int(counts.sum()), planes, mask[:, None], fill, take)

    def _chunk(self, sequence: ScheduledSequence) -> Chunk:
        """A sequence's tokens cut into tiles of `TILE_ROWS` queries."""
        end = _end(sequence)
        tiles = tuple(
            self._tile(first, min(first + TILE_ROWS, end))
            for first in range(sequence.start, end, TILE_ROWS)
        )
        return Chunk(self._planes([sequence], tiles[-1].mask.shape[-1]), tiles)

    def _tile(self, first: int, last: int) -> QueryTile:
        """Queries at positions `first` to `last`-1; rows beyond them repeat the last one."""
        context = padded_context(last, self._block_size)
        rows = torch.arange(first, first + padded_rows(last - first), device=self._device)
        mask = self._mask(rows.clamp_(max=last - 1), context)
        return QueryTile(last - first, mask[None, None])

    def _planes(self, members: Sequence[ScheduledSequence], context: int) -> Tensor:
        blocks = np.stack([self._blocks(member, context) for member in members])
        return self._ints(self._layout.planes(blocks))

    def _blocks(self, sequence: ScheduledSequence, context: int) -> Ints:
        """The blocks that hold the sequence's tokens, filled up to `context`: masked keys weigh
        zero, but zero times a nan is nan, so none is read that may hold anything.
        """
        blocks = np.full(context // self._block_size, self._layout.padding_block, np.int64)
        used = sequence.block_table[: -(-_end(sequence) // self._block_size)]
        blocks[: len(used)] = used
        return blocks

    def _mask(self, positions: Tensor, context: int) -> Tensor:
        """What is added to the scores [..., Q, context] of queries at positions [..., Q]: 0 for
        keys that a query sees, -inf for those behind it and below the first position.
        """
        keys = torch.arange(context, device=self._device)
        hidden = keys > positions.unsqueeze(-1)
        if self._layout.first_position:
            hidden |= keys < self._layout.first_position
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _ints(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


__all__ = ["CacheLayout", "InputBatch"]


class InputBatch:
    """One step's sequences in row order, and their tensors. Built once, read by the runner.

    `order` is the sequences in the order of their rows. The rows of `tensors.sample_rows` are: the
    last 1 + `num_drafts` ones of each of `sampled`, then one for each prompt target of each of
    `scored`, then the last one of each of `silent`, whose logits are not wanted. `token_slots` [T]
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
