"""Causal attention over a paged cache as Triton kernels: decoding, verification, chunks of prompts.

Query heads that share a KV head are rows of one tile, so that its keys and values are read once.

With at most `SHORT_ROWS` rows (a decoded token, or drafts under verification) the context of a
sequence is cut into splits, whose outputs `_merge_kernel` combines. Splits are `SPLIT_TOKENS` long,
or a multiple of that: their bounds follow from the context alone. The batch and the device decide
only the number of programs that share the splits of a context (`num_programs`). So the sums of a
row run in the same order in any batch. With more rows (a chunk of a prompt) one program reads the
whole context for a tile of rows.

A row never depends on positions that it does not see. The later tokens of its own sequence have
weight zero; but zero times nan is nan, so if some rows of a tile see a key and others do not, non-
finite values are replaced by zeros, and the scores of the rows that do see them by nan.

Scores are in powers of two: exp2 is an instruction of a GPU, exp is not.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.backends import AttentionShape
from worker.ops.step import StepTensors

SHORT_ROWS = 16
SPLIT_TOKENS = 256
MAX_SPLITS = 64  # bounds the partial results, which graphs hold for the longest context
# Programs per multiprocessor: enough that the last programs leave few multiprocessors idle.
_WAVES = 8
# Rows of a tile of the short path: the minimum of a product on tensor cores.
_SHORT_TILE = 16
# Numbers in a tile of float32 keys, whose products use no tensor cores but many registers.
_FLOAT32_TILE_NUMBERS = 2048
# Values that differ between steps must not compile a kernel again: numbers, and the offset in a
# packed tensor at which a vector begins.
_NUMBERS = ("first_position", "size", "stride_table", "rows", "slots")
_VECTORS = ("tables", "query_starts", "context_lens")
# Each call of Triton's takes the host microseconds.
_power_of_2 = functools.cache(triton.next_power_of_2)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan that every layer of a step shares. The kernels read lengths, tables and row numbers
    from `step` on the device, so that a graph holds `run` for any values in the same tensors.

    Each of the S · `rows` places of the short path writes up to `slots` partial results for each
    head: outputs `partials` [S · rows, heads, slots, head_dim] and base-two logarithms of masses
    `masses` [S · rows, heads, slots], float32.
    """

    step: StepTensors
    shape: AttentionShape
    rows: int
    has_chunks: bool
    slots: int
    num_sms: int
    partials: Tensor
    masses: Tensor


def num_splits(num_tokens: int) -> int:
    return min(MAX_SPLITS, -(-num_tokens // SPLIT_TOKENS))


def num_programs(splits: int, num_tiles: int, num_sms: int) -> int:
    """Return the number of programs that share the `splits` of each of `num_tiles` tiles of rows,
    to keep `num_sms` multiprocessors busy: at least 1, at most one for each split.
    """
    each = max(1, splits * num_tiles // (_WAVES * num_sms))
    return max(1, -(-splits // each))


def plan(step: StepTensors, shape: AttentionShape, num_sms: int) -> AttentionPlan:
    size, width = step.block_tables.shape
    rows = min(step.max_rows, SHORT_ROWS)
    slots = max(1, num_splits(min(step.max_context, width * shape.block_size)))
    # A single split writes to `out` itself.
    places = size * rows if slots > 1 else 0
    device = step.block_tables.device
    partials = torch.empty(places, shape.heads, slots, shape.head_dim, device=device)
    masses = torch.empty(places, shape.heads, slots, device=device)
    has_chunks = step.max_rows > SHORT_ROWS
    return AttentionPlan(step, shape, rows, has_chunks, slots, num_sms, partials, masses)


def run(
    queries: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    window: int | None = None,
    scales: Tensor | None = None,
) -> None:
    """Write attention of queries [T, heads, head_dim] over one layer's cache to `out`.

    cache [num_blocks, 2, kv_heads, block_size, head_dim] already holds the step's own keys;
    float8_e4m3fn is multiplied by scales [2, kv_heads] float32. A row sees at most `window`
    positions, its own included. A row that sees nothing is zero. Twin:
    `worker.ops.paged_attention`.
    """
    step, shape = plan.step, plan.shape
    size, num_rows = step.context_lens.shape[0], queries.shape[0]
    if not size or not num_rows:
        return
    sharing = shape.heads // shape.kv_heads
    common: tuple[Any, ...] = (
        queries,
        cache,
        out,
        scales,
        step.block_tables,
        step.query_starts,
        step.context_lens,
        shape.scale * math.log2(math.e),
        step.first_position,
        size,
        step.block_tables.stride(0),
        *queries.stride()[:2],
        *cache.stride()[:3],
    )
    constants = {
        "sharing": sharing,
        "head_dim": shape.head_dim,
        "padded_dim": _power_of_2(shape.head_dim),
        "block_size": shape.block_size,
        "product": product_type(queries),
        "window": window or 0,
        "softcap": shape.softcap * math.log2(math.e),
    }
    _run_short(common, constants, plan)
    if plan.slots > 1:
        _merge_kernel[(size * plan.rows, shape.heads)](
            out,
            plan.partials,
            plan.masses,
            step.query_starts,
            step.context_lens,
            plan.rows,
            plan.slots,
            head_dim=shape.head_dim,
            padded_dim=constants["padded_dim"],
        )
    if plan.has_chunks:
        tile, how = _chunk_launch(queries)
        tile = max(tile, _power_of_2(sharing))
        num_tiles = num_rows // (tile // sharing) + size
        _chunk_kernel[(num_tiles, shape.kv_heads)](*common, tile_rows=tile, **how, **constants)


def _run_short(common: tuple[Any, ...], constants: dict[str, Any], plan: AttentionPlan) -> None:
    shape, size = plan.shape, plan.step.context_lens.shape[0]
    sharing = shape.heads // shape.kv_heads
    tile = max(_SHORT_TILE, _power_of_2(sharing))
    num_tiles = size * -(-plan.rows // (tile // sharing))
    programs = num_programs(plan.slots, num_tiles * shape.kv_heads, plan.num_sms)
    _split_kernel[(num_tiles, shape.kv_heads, programs)](
        *common,
        plan.partials,
        plan.masses,
        plan.rows,
        plan.slots,
        tile_rows=tile,
        **_short_launch(common[0]),
        **constants,
    )


def _short_launch(queries: Tensor) -> dict[str, int]:
    """Return the launch options of the short path, the same for every batch, as sums have to be.
    They were found by `benchmarks/gpu.py --tiles` on an H100.
    """
    if queries.dtype is torch.float32:
        return {"tile_keys": _float32_tile(queries)}
    return {"tile_keys": 32, "num_warps": 2, "num_stages": 2}


def _chunk_launch(queries: Tensor) -> tuple[int, dict[str, int]]:
    if queries.dtype is torch.float32:
        tile = _float32_tile(queries)
        return tile, {"tile_keys": tile}
    width = _power_of_2(queries.shape[2])
    keys = min(64, max(16, 4096 // width))
    # With more registers per program, a multiprocessor runs one program at a time, not two.
    how = {"tile_keys": keys, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
    return min(128, 16384 // width), how


def _float32_tile(queries: Tensor) -> int:
    width = _power_of_2(queries.shape[2])
    return int(min(64, max(16, _FLOAT32_TILE_NUMBERS // width)))


def product_type(x: Tensor) -> Any:
    """Return the type of products, whose sums are in float32: that of the inputs on a GPU. The
    interpreter's products of bfloat16 are wrong, so there it is float32.
    """
    wide = x.device.type != "cuda" or x.dtype is torch.float32
    return tl.float32 if wide else tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16


@triton.jit
def _split_tokens(
    num_tokens: tl.tensor, split_tokens: tl.constexpr, max_splits: tl.constexpr
) -> Any:
    return split_tokens * tl.maximum(1, tl.cdiv(num_tokens, split_tokens * max_splits))


@triton.jit
def _attend(  # noqa: PLR0913, PLR0915, PLR0917
    queries: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    highs: tl.tensor,
    first_position: tl.tensor,
    factor: tl.tensor,
    stride_block: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    tile_rows: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    product: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
) -> Any:
    """Attend with the rows that begin at `at` [rows] of the queries to the keys at `begin` to `end`
    - 1: return outputs [rows, padded_dim], and base-two logarithms of the masses [rows], -inf for a
    row that sees nothing. Row r is at position `highs[r]`, the first row at `first`.
    """
    dims = tl.arange(0, padded_dim)
    query = tl.load(queries + at[:, None] + dims[None, :], mask=mask, other=0.0).to(product)
    floor = first_position
    lows = tl.full((tile_rows,), first_position, tl.int32)
    if window > 0:
        floor = tl.maximum(floor, first - window + 1)
        lows = tl.maximum(lows, highs - window + 1)
    begin = tl.maximum(begin, floor // tile_keys * tile_keys)
    # Before this position, every row sees every key of a tile.
    middle = begin
    if window == 0:
        whole = tl.maximum(tl.minimum(first + 1, end) - begin, 0) // tile_keys * tile_keys
        middle = tl.where(floor > begin, begin, begin + whole)
    kv_head = tl.program_id(1)
    keys = cache + kv_head * stride_head
    values = keys + stride_plane
    if scales is not None:
        factor *= tl.load(scales + kv_head)
    acc = tl.zeros((tile_rows, padded_dim), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    peak = tl.full((tile_rows,), float("-inf"), tl.float32)
    for is_edge in tl.static_range(2):
        for tile in range(middle if is_edge else begin, end if is_edge else middle, tile_keys):
            positions = tile + tl.arange(0, tile_keys)
            # Elsewhere the cache holds all keys of a tile: a mask would only cost time.
            held = (positions >= floor) & (positions < end) if is_edge else positions >= 0
            entries = table + positions // block_size
            blocks = tl.load(entries, mask=held, other=0) if is_edge else tl.load(entries)
            places = blocks.to(tl.int64) * stride_block + (positions % block_size) * head_dim
            keys_at = keys + places[None, :] + dims[:, None]
            values_at = values + places[:, None] + dims[None, :]
            if is_edge or head_dim != padded_dim:
                seen_key = held[None, :] & (dims < head_dim)[:, None]
                seen_value = held[:, None] & (dims < head_dim)[None, :]
                key = tl.load(keys_at, mask=seen_key, other=0.0).to(product)
                value = tl.load(values_at, mask=seen_value, other=0.0).to(product)
            else:
                key = tl.load(keys_at).to(product)
                value = tl.load(values_at).to(product)
            scores = tl.dot(query, key, input_precision="ieee") * factor
            if softcap > 0:  # times tanh
                scores = softcap - 2.0 * softcap / (1.0 + tl.exp(scores * (2.0 / softcap)))
            if is_edge:
                finite = tl.abs(value.to(tl.float32)) < float("inf")
                spoiled = tl.min(finite.to(tl.int32), axis=1) == 0
                value = tl.where(finite, value, 0.0).to(product)
                scores = tl.where(spoiled[None, :], float("nan"), scores)
                seen = (positions[None, :] >= lows[:, None]) & held[None, :]
                seen &= positions[None, :] <= highs[:, None]
                scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, axis=1))
            # If all scores are -inf, subtract nothing: the difference would be nan.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(peak - shift)
            total = total * decay + tl.sum(weights, axis=1)
            acc = acc * decay[:, None] + tl.dot(weights.to(product), value, input_precision="ieee")
            peak = highest
    if scales is not None:
        acc *= tl.load(scales + tl.num_programs(1) + kv_head)
    mass = tl.where(total == 0.0, 1.0, total)
    return acc / mass[:, None], tl.where(total == 0.0, float("-inf"), peak + tl.log2(mass))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def _split_kernel(  # noqa: PLR0913, PLR0917
    queries: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    factor: tl.tensor,
    first_position: tl.tensor,
    size: tl.tensor,
    stride_table: tl.tensor,
    stride_row: tl.tensor,
    stride_query_head: tl.tensor,
    stride_block: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    partials: tl.tensor,
    masses: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    tile_rows: tl.constexpr,
    sharing: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    product: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    short_rows: tl.constexpr = SHORT_ROWS,
    split_tokens: tl.constexpr = SPLIT_TOKENS,
    max_splits: tl.constexpr = MAX_SPLITS,
) -> None:
    per_tile: tl.constexpr = tile_rows // sharing
    index = tl.arange(0, tile_rows)
    real = index < per_tile * sharing
    tiles = tl.cdiv(rows, per_tile)
    sequence = tl.program_id(0) // tiles
    rank = tl.program_id(0) % tiles * per_tile
    ranks = rank + index // sharing
    places = sequence * rows + ranks
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    if (rank >= count) | (count > short_rows):
        return
    table = tables + sequence.to(tl.int64) * stride_table
    context = tl.load(context_lens + sequence)
    first = context - count + rank
    end = tl.minimum(first + per_tile, context)
    highs = context - count + ranks
    real &= ranks < count
    dims = tl.arange(0, padded_dim)
    heads = tl.program_id(1) * sharing + index % sharing
    rows_at = (start + ranks).to(tl.int64)
    mask = real[:, None] & (dims < head_dim)[None, :]
    num_heads = tl.num_programs(1) * sharing
    length = _split_tokens(context, split_tokens, max_splits)
    # With a single slot, a row that sees nothing is written, too.
    splits = tl.where(slots == 1, 1, tl.cdiv(context, length))
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        begin = split * length
        result, mass = _attend(
            queries,
            cache,
            scales,
            table,
            rows_at * stride_row + heads * stride_query_head,
            mask,
            begin,
            tl.minimum(begin + length, end),
            first,
            highs,
            first_position,
            factor,
            stride_block,
            stride_plane,
            stride_head,
            tile_rows,
            head_dim,
            padded_dim,
            block_size,
            tile_keys,
            product,
            window,
            softcap,
        )
        if slots == 1:
            at = (rows_at * num_heads + heads) * head_dim
            tl.store(out + at[:, None] + dims[None, :], result, mask=mask)
        else:
            at = (places.to(tl.int64) * num_heads + heads) * slots + split
            tl.store(partials + (at * head_dim)[:, None] + dims[None, :], result, mask=mask)
            tl.store(masses + at, mass, mask=real)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def _merge_kernel(  # noqa: PLR0913, PLR0917
    out: tl.tensor,
    partials: tl.tensor,
    masses: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    short_rows: tl.constexpr = SHORT_ROWS,
    split_tokens: tl.constexpr = SPLIT_TOKENS,
    max_splits: tl.constexpr = MAX_SPLITS,
) -> None:
    place = tl.program_id(0)
    sequence = place // rows
    rank = place % rows
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    if (rank >= count) | (count > short_rows):
        return
    context = tl.load(context_lens + sequence)
    splits = tl.cdiv(context, _split_tokens(context, split_tokens, max_splits))
    at = (place.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * slots
    index = tl.arange(0, max_splits)
    mass = tl.load(masses + at + index, mask=index < splits, other=float("-inf"))
    peak = tl.max(mass, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(mass - shift), axis=0)
    dims = tl.arange(0, padded_dim)
    inside = dims < head_dim
    acc = tl.zeros((padded_dim,), tl.float32)
    for split in range(splits):
        weight = tl.exp2(tl.load(masses + at + split) - shift)
        part = tl.load(partials + (at + split) * head_dim + dims, mask=inside, other=0.0)
        acc += weight * part
    row = (start + rank).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + row * head_dim + dims, acc / tl.where(total == 0.0, 1.0, total), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def _chunk_kernel(  # noqa: PLR0913, PLR0917
    queries: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    factor: tl.tensor,
    first_position: tl.tensor,
    size: tl.tensor,
    stride_table: tl.tensor,
    stride_row: tl.tensor,
    stride_query_head: tl.tensor,
    stride_block: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    tile_rows: tl.constexpr,
    sharing: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    product: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    short_rows: tl.constexpr = SHORT_ROWS,
) -> None:
    """Attend with a tile of rows of one sequence of the chunked path over its whole context.

    Sequence s has the tiles from query_starts[s] // rows of a tile + s on: enough for its rows, and
    located by bisection.
    """
    per_tile: tl.constexpr = tile_rows // sharing
    tile = tl.program_id(0)
    sequence, above = tile * 0, tile * 0 + size
    while above - sequence > 1:
        middle = (sequence + above) // 2
        is_below = tl.load(query_starts + middle) // per_tile + middle <= tile
        sequence = tl.where(is_below, middle, sequence)
        above = tl.where(is_below, above, middle)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    rank = (tile - start // per_tile - sequence) * per_tile
    if (rank >= count) | (count <= short_rows):
        return
    context = tl.load(context_lens + sequence)
    index = tl.arange(0, tile_rows)
    ranks = rank + index // sharing
    real = (index < per_tile * sharing) & (ranks < count)
    first = context - count + rank
    dims = tl.arange(0, padded_dim)
    heads = tl.program_id(1) * sharing + index % sharing
    rows_at = (start + ranks).to(tl.int64)
    mask = real[:, None] & (dims < head_dim)[None, :]
    result, _ = _attend(
        queries,
        cache,
        scales,
        tables + sequence.to(tl.int64) * stride_table,
        rows_at * stride_row + heads * stride_query_head,
        mask,
        0,
        tl.minimum(first + per_tile, context),
        first,
        context - count + ranks,
        first_position,
        factor,
        stride_block,
        stride_plane,
        stride_head,
        tile_rows,
        head_dim,
        padded_dim,
        block_size,
        tile_keys,
        product,
        window,
        softcap,
    )
    at = (rows_at * (tl.num_programs(1) * sharing) + heads) * head_dim
    tl.store(out + at[:, None] + dims[None, :], result, mask=mask)
