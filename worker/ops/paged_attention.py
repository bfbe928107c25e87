"""Causal attention over a paged cache: a batch of single tokens and chunks of prompts together.

The blocks of a sequence are gathered into its keys and values [kv_heads, S, head_dim], and its
queries run in tiles; query heads that share a KV head become rows of one product. A chunk's keys
and values are written first and read back, so prompts, chunks and prefix hits share one path.

A row never depends on positions that it does not see. The later tokens of its own sequence have
weight zero; but zero times nan is nan, so keys and values that are not finite are zeroed, and the
rows that do see one become nan.

Nor does a row depend on the rows computed with it. Shapes are restricted to a class in which the
fused kernel sums a row in the same order: at least `MIN_ROWS` query rows (`padded_rows`), and
contexts of lengths at which sums are split alike (`padded_context`).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from worker.ops.step import StepTensors

MIN_ROWS = 4
TILE_ROWS = 128
# Measured on CPUs: the fused kernel takes 32 rows and 512 keys at a time, in vectors of 16 keys,
# and MKL splits some last parts at a point that depends on their length: on an EPYC those longer
# than 192 and shorter than 384 keys, on a Xeon with AMX those longer than 384, and a full one at
# 256. So a part is either short enough that no CPU splits it, or full.
_ROW_PARTITION = 32
_MIN_FREE_ROWS = 12
_KEY_VECTOR = 16
_KEY_PARTITION = 512
_MAX_UNSPLIT = 192
_MAX_EIGHT_BITS = 448.0  # of float8_e4m3fn
# Keys of one product of attention with a softcap.
_CAPPED_ROWS = 32
_CAPPED_KEYS = 256


def padded_rows(count: int, kv_heads: int = 0) -> int:
    """Return the query rows to run for `count` queries (at most `TILE_ROWS`), such that every part
    that the fused kernel takes at a time has at least `MIN_ROWS`.

    With one KV head, whose product may be the only one of a call, MKL divides it among the cores,
    and only in fours do all rows of a small part get the same sums.
    """
    tail = count % _ROW_PARTITION
    if kv_heads == 1 and tail < _MIN_FREE_ROWS:
        return count + -tail % MIN_ROWS
    return count + max(MIN_ROWS - tail, 0) if tail else count


def padded_context(length: int, block_size: int) -> int:
    """Return how many keys to read for a context of `length`: a whole number of blocks, such that
    every product sums a row in the same order as at any other number returned.
    """
    granule = math.lcm(block_size, _KEY_VECTOR)
    padded = -(-length // granule) * granule
    tail = padded % _KEY_PARTITION
    if tail > _MAX_UNSPLIT:
        padded += _KEY_PARTITION - tail
    return -(-padded // granule) * granule


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    step: StepTensors,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend with queries [T, heads, head_dim] over one layer's cache → [T, heads · head_dim].

    cache [num_blocks, 2, kv_heads, block_size, head_dim] already holds the step's own keys, and is
    multiplied by `scales` [2, kv_heads] if given. Scores are multiplied by `scale`, or 1 /
    sqrt(head_dim); a `softcap` c > 0 then turns them into c · tanh(score / c). A row sees at most
    `window` positions, its own included; a row that sees nothing is zero.
    """
    planes = _planes(cache, step.block_tables)
    starts: list[int] = step.query_starts.tolist()
    outputs = []
    for index, context in enumerate(step.context_lens.tolist()):
        rows = queries[starts[index] : starts[index + 1]]
        # Rows that pad a sequence of a graph may stand before its first position.
        num_blind = max(0, len(rows) - context)
        if num_blind:
            outputs.append(queries.new_zeros(num_blind, queries.shape[1] * queries.shape[2]))
            rows = rows[num_blind:]
        if not len(rows):
            continue
        keys, values = (part.to(queries.dtype) for part in _gather(cache, planes[index], context))
        if scales is not None:
            keys, values = keys * scales[0, :, None, None], values * scales[1, :, None, None]
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        start = context - len(rows)
        hidden = step.first_position
        if window is not None:
            hidden = max(hidden, start - window + 1)
        # A block that no row sees may belong to another sequence by now, whose numbers may be nan.
        keys[:, :hidden] = values[:, :hidden] = 0
        view = _View(start, step.first_position, window, scale or queries.shape[2] ** -0.5, softcap)
        outputs.append(_attend(rows, keys, values, view))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _planes(cache: Tensor, block_tables: Tensor) -> Tensor:
    """Return the planes [S, 2 · kv_heads, padded W] of the cache that block tables [S, W] name."""
    num_planes, block_size = 2 * cache.shape[2], cache.shape[3]
    width = block_tables.shape[1]
    padded = padded_context(width * block_size, block_size) // block_size
    # Padding names block 0; `_gather` zeroes what it reads from there.
    tables = functional.pad(block_tables, (0, padded - width)).unsqueeze(1)
    return tables * num_planes + torch.arange(num_planes, device=tables.device).unsqueeze(1)


def _gather(cache: Tensor, planes: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Gather keys and values [kv_heads, S, head_dim] of a sequence with `context` tokens, then
    zeros.

    With the keys of a head side by side, attention at 512 keys takes half the time.
    """
    _, _, kv_heads, block_size, head_dim = cache.shape
    num_blocks = padded_context(context, block_size) // block_size
    rows = _plain(cache).view(-1, block_size * head_dim)
    gathered = rows.index_select(0, planes[:, :num_blocks].flatten())
    gathered = gathered.view(2, kv_heads, -1, head_dim)
    # Unwritten slots may hold nan, and weight zero times nan is nan.
    gathered[:, :, context:] = 0
    keys, values = gathered.view(cache.dtype)
    return keys, values


def _plain(cache: Tensor) -> Tensor:
    """View the same memory in a type that torch can copy rows of."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


class _View(NamedTuple):
    start: int
    first_seen: int
    window: int | None
    scale: float
    softcap: float


def _attend(queries: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
    sharing = queries.shape[1] // len(keys)
    spoiled = None
    # A lone row sees all that is read, so every nan is its own.
    if len(queries) > 1:
        spoiled = _take_spoiled(keys, values, view.start, len(queries), view.window)
    attend_tile, most = (_attend_tile, TILE_ROWS)
    if view.softcap:
        attend_tile, most = (_attend_capped_tile, _CAPPED_ROWS)
    outputs = []
    size = max(1, most // sharing)
    for first in range(0, len(queries), size):
        tile = queries[first : first + size]
        outputs.append(attend_tile(tile, keys, values, view._replace(start=view.start + first)))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if spoiled is None else output.masked_fill_(spoiled, torch.nan)


def _take_spoiled(
    keys: Tensor, values: Tensor, start: int, count: int, window: int | None
) -> Tensor:
    """Zero non-finite numbers at positions that only some of the `count` rows from `start` on see;
    return which of these rows [count, 1] see any of them.
    """
    lowest = start if window is None else max(0, start - window + 1)
    bad = torch.zeros(start + count - lowest, dtype=torch.bool, device=keys.device)
    for part in (keys, values):
        own = part[:, lowest : start + count]
        bad |= ~own.isfinite().all(dim=-1).all(dim=0)
    for part in (keys, values):
        part[:, lowest : start + count].masked_fill_(bad.unsqueeze(-1), 0)
    seen = functional.pad(bad.cumsum(0), (1, 0))
    ends = torch.arange(start - lowest + 1, len(seen), device=keys.device)
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    return (seen[ends] > seen[begins]).unsqueeze(-1)


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
    """Attend as `_attend` does, with few enough queries for one product per KV head."""
    sharing = queries.shape[1] // len(keys)
    count = len(queries) * sharing
    rows, own = _rows(queries, len(keys), padded_rows(count, len(keys)), view)
    context = padded_context(view.start + len(queries), _KEY_VECTOR)
    out = functional.scaled_dot_product_attention(
        rows.unsqueeze(0),
        keys[None, :, :context],
        values[None, :, :context],
        attn_mask=_seen(own, 0, context, view),
        scale=view.scale,
    )
    return _unrolled(out[0], queries)


def _attend_capped_tile(queries: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
    """Attend with a softcap, which the fused kernel does not support: in float32, a part of the
    keys at a time. All products have one shape in every step, so that sums run in one order.
    """
    sharing, context = queries.shape[1] // len(keys), view.start + len(queries)
    rows, own = _rows(queries, len(keys), max(_CAPPED_ROWS, sharing), view)
    rows = rows.float() * view.scale
    peak = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    total, acc = torch.zeros_like(peak), torch.zeros_like(rows)
    for begin in range(0, context, _CAPPED_KEYS):
        key, value = (part[:, begin : begin + _CAPPED_KEYS].float() for part in (keys, values))
        missing = (0, 0, 0, _CAPPED_KEYS - key.shape[1])
        key, value = functional.pad(key, missing), functional.pad(value, missing)
        scores = (rows @ key.transpose(1, 2)).div_(view.softcap).tanh_().mul_(view.softcap)
        scores.masked_fill_(~_seen(own, begin, begin + _CAPPED_KEYS, view), -torch.inf)
        highest = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        shift = highest.masked_fill(highest == -torch.inf, 0.0)
        weights, decay = (scores - shift).exp_(), (peak - shift).exp_()
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        acc = acc * decay + weights @ value
        peak = highest
    return _unrolled((acc / total).to(queries.dtype), queries)


def _rows(queries: Tensor, kv_heads: int, padded: int, view: _View) -> tuple[Tensor, Tensor]:
    """Return queries as rows [kv_heads, padded, head_dim] by the KV head that they share, padded
    with repetitions of the first ones; and the positions [padded, 1] of the rows.
    """
    num_queries, heads, head_dim = queries.shape
    sharing = heads // kv_heads
    order = torch.arange(padded, device=queries.device) % (num_queries * sharing)
    rows = queries.view(num_queries, kv_heads, sharing, head_dim).transpose(0, 1)
    rows = rows.reshape(kv_heads, -1, head_dim).index_select(1, order)
    return rows, view.start + (order // sharing).unsqueeze(1)


def _seen(own: Tensor, begin: int, end: int, view: _View) -> Tensor:
    """Return which of the positions `begin` to `end` - 1 the rows at positions `own` [R, 1] see."""
    positions = torch.arange(begin, end, device=own.device)
    seen = positions <= own
    if view.window is not None:
        seen &= positions > own - view.window
    if view.first_seen:
        seen &= positions >= view.first_seen
    return seen


def _unrolled(rows: Tensor, queries: Tensor) -> Tensor:
    num_queries, heads, head_dim = queries.shape
    count = num_queries * heads // len(rows)
    out = rows[:, :count].reshape(len(rows), num_queries, -1)
    return out.transpose(0, 1).reshape(num_queries, heads * head_dim)


def write_kv(cache: Tensor, kv: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Write kv [T, 2·kv_heads·head_dim] (keys, then values) into one layer's cache.

    cache [num_blocks, 2, kv_heads, block_size, head_dim]; numbers are divided by `scales` [2,
    kv_heads] if given, then rounded to the cache's dtype; float8_e4m3fn saturates at 448. `slots`
    [T] int32 are block · block_size + offset of each token, without duplicates.
    """
    _, _, kv_heads, block_size, head_dim = cache.shape
    blocks, offsets = slots // block_size, slots % block_size
    kv = kv.view(-1, 2, kv_heads, head_dim)
    if scales is not None:
        kv = kv.float() / scales.unsqueeze(-1)
    if cache.dtype is torch.float8_e4m3fn:
        kv = kv.float().clamp(-_MAX_EIGHT_BITS, _MAX_EIGHT_BITS)
    _plain(cache)[blocks, :, :, offsets] = _plain(kv.to(cache.dtype))
