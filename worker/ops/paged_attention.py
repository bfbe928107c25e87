"""Causal attention over a paged cache: a batch of single tokens and chunks of prompts together.

Theory of operation. A step is cut into three kinds of work. Sequences that run one token are
grouped by padded context length, and a group is one call: its blocks are gathered into [B, S] keys,
and the query heads that share a KV head become the rows of one product. Sequences that run a few
tokens (drafts to verify, ends of prompts) are grouped likewise: each query has a row for each head
that shares. A sequence that runs more tokens is cut into tiles of queries, each attending from the
start of the sequence to the tile's end.

Masked keys weigh exactly zero, so padding does not change a result. What could change it is the
shape of the products inside the fused kernel, so shapes are kept to a class in which a row's sums
always run in the same order: never fewer than `MIN_ROWS` query rows (`padded_rows`), and contexts
of lengths at which sums are split alike (`padded_context`). Keys and values of a chunk are
written to the cache first and read back from it, so prompts, chunks and prefix hits are one path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 4
TILE_ROWS = 128
# Measured on CPUs: the fused kernel takes 32 rows and 512 keys at a time, in vectors of 16 keys,
# and MKL splits some last parts at a point that depends on their length: on an EPYC those longer
# than 192 and shorter than 384 keys, on a Xeon with AMX those longer than 384, and a full one at
# 256. So a part is at most as long as what none of them splits, or full.
_ROW_PARTITION = 32
_LEAST_FREE_ROWS = 12
_KEY_VECTOR = 16
_KEY_PARTITION = 512
_MOST_UNSPLIT = 192


def padded_rows(count: int, kv_heads: int = 0) -> int:
    """Query rows to run for `count` queries (at most `TILE_ROWS`), so that no part of them that the
    fused kernel takes at a time has fewer than `MIN_ROWS`.

    With one KV head, whose product may be the only one of a call, MKL divides it among the cores,
    and only in fours do all rows of a small part get the same sums.
    """
    tail = count % _ROW_PARTITION
    if kv_heads == 1 and tail < _LEAST_FREE_ROWS:
        return count + -tail % MIN_ROWS
    return count + max(MIN_ROWS - tail, 0) if tail else count


def padded_context(length: int, block_size: int) -> int:
    """Keys to read for a context of `length`: whole blocks, of a count at which every product sums
    a row in the same order as at any other such count.
    """
    granule = math.lcm(block_size, _KEY_VECTOR)
    padded = -(-length // granule) * granule
    tail = padded % _KEY_PARTITION
    if tail > _MOST_UNSPLIT:
        padded += _KEY_PARTITION - tail
    return -(-padded // granule) * granule


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that run one token each and share a padded context length S.

    `planes` [B · 2 · kv_heads · S / block_size] int64 are the planes of the cache to gather: for
    each sequence, then keys and values, then each head, one a block. `mask` [B, 1, 1, S] is 0
    or -inf.
    """

    num_sequences: int
    planes: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Sequences that run up to n consecutive tokens each, `num_rows` together, and share a padded
    context length S.

    `planes` as a decode group's. `mask` [B, 1, rows, S] is 0 or -inf; `rows` is n times the heads
    that share a KV head, query by query, and the first of these again up to `padded_rows`. Where a
    sequence has fewer than n queries, `fill` [B · n] are the group's rows that make them n, and
    `take` [num_rows] says which of these are wanted; None: all have n.
    """

    num_sequences: int
    num_rows: int
    planes: Tensor
    mask: Tensor
    fill: Tensor | None = None
    take: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive queries of a chunk, `num_queries` real ones among `mask.shape[-2]` rows.

    `mask` [1, 1, rows, S], 0 or -inf; keys 0 to S-1 of the sequence are read.
    """

    num_queries: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence that runs several tokens; `planes` as a group's, over the whole context."""

    planes: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention. The rows of the step are the groups' sequences in order, then the
    spans' tokens in order, then the chunks'.
    """

    groups: tuple[DecodeGroup, ...]
    spans: tuple[SpanGroup, ...]
    chunks: tuple[Chunk, ...]


def paged_attention(queries: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    """queries [T, heads, head_dim] over one layer's cache → [T, heads · head_dim].

    cache [num_blocks, 2, kv_heads, block_size, head_dim] holds the step's own keys already.
    Softmax scale is 1 / sqrt(head_dim). Twin: `reference_ops.paged_attention`.
    """
    outputs: list[Tensor] = []
    start = 0
    for group in plan.groups:
        end = start + group.num_sequences
        outputs.append(_decode(queries[start:end], cache, group))
        start = end
    for span in plan.spans:
        end = start + span.num_rows
        outputs.append(_attend_spans(queries[start:end], cache, span))
        start = end
    for chunk in plan.chunks:
        keys, values = _gather(cache, chunk.planes, 1)
        for tile in chunk.tiles:
            end = start + tile.num_queries
            outputs.append(_attend_tile(queries[start:end], keys, values, tile))
            start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(cache: Tensor, planes: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, kv_heads, S, head_dim] of B sequences with equally many blocks.

    The keys of a head end up side by side, which halves the time of attention at 512 keys against
    a layout that has the heads of a token side by side.
    """
    _, _, kv_heads, block_size, head_dim = cache.shape
    gathered = cache.view(-1, block_size * head_dim).index_select(0, planes)
    keys, values = gathered.view(num_sequences, 2, kv_heads, -1, head_dim).unbind(1)
    return keys, values


def _decode(queries: Tensor, cache: Tensor, group: DecodeGroup) -> Tensor:
    """queries [B, heads, head_dim] → [B, heads · head_dim]."""
    batch, heads, head_dim = queries.shape
    keys, values = _gather(cache, group.planes, batch)
    sharing = heads // keys.shape[1]
    rows = queries.view(batch, keys.shape[1], sharing, head_dim)
    wanted = padded_rows(sharing, keys.shape[1])
    if sharing < wanted:
        rows = torch.cat([rows] * -(-wanted // sharing), dim=2)[:, :, :wanted]
    out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
    return out[:, :, :sharing].reshape(batch, heads * head_dim)


def _attend_spans(queries: Tensor, cache: Tensor, group: SpanGroup) -> Tensor:
    """queries [num_rows, heads, head_dim] → [num_rows, heads · head_dim]."""
    if group.fill is not None:
        queries = queries.index_select(0, group.fill)
    batch, (_, heads, head_dim) = group.num_sequences, queries.shape
    keys, values = _gather(cache, group.planes, batch)
    kv_heads = keys.shape[1]
    rows = queries.view(batch, -1, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
    rows = rows.reshape(batch, kv_heads, -1, head_dim)
    count, padded = rows.shape[2], group.mask.shape[2]
    if padded > count:
        rows = torch.cat((rows, rows[:, :, : padded - count]), dim=2)
    out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
    out = out[:, :, :count].reshape(batch, kv_heads, -1, heads // kv_heads, head_dim)
    out = out.transpose(1, 2).reshape(-1, heads * head_dim)
    return out if group.take is None else out.index_select(0, group.take)


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, tile: QueryTile) -> Tensor:
    """queries [Q, heads, head_dim] → [Q, heads · head_dim]."""
    num_queries, heads, head_dim = queries.shape
    rows, context = tile.mask.shape[-2:]
    if rows > num_queries:
        queries = torch.cat((queries, queries[-1:].expand(rows - num_queries, -1, -1)))
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys[:, :, :context],
        values[:, :, :context],
        attn_mask=tile.mask,
        enable_gqa=heads != keys.shape[1],
    )
    return out[0].transpose(0, 1)[:num_queries].reshape(num_queries, heads * head_dim)


def write_kv(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write kv [T, 2·kv_heads·head_dim] (keys, then values) into one layer's cache.

    cache [num_blocks, 2, kv_heads, block_size, head_dim]; `slots` [T · 2 · kv_heads] int64 say
    where each head of each token goes among the cache's rows of head_dim values; none twice.
    """
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, slots, kv.reshape(-1, head_dim))
