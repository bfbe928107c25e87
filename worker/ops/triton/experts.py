"""Mixtures of experts as grouped products, without waiting for the device to report the choice.

Each row and each of its chosen experts are a pair. Pairs are sorted by expert, and each expert's
pairs are cut into tiles. Only the device knows their number, so the maximal number of programs is
launched, and programs without a tile end at once. A pair writes its own row, and the pairs of a row
are summed by its weights in the order of its choice.

Tiles of dense weights have one size, and a product's sum runs over the inner features in order, so
a row's numbers depend neither on the rows that share its tile nor on their number. Packed weights
have smaller tiles where an expert has few pairs; see `planes`.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.experts import Experts
from worker.ops.planes import PlaneWeight
from worker.ops.triton import planes
from worker.ops.triton.attention import product_type

_TILE_ROWS = 64
_TILE_COLUMNS = 128
_TILE_INNER = 64
# For float32, whose products use no tensor cores but many registers.
_FLOAT32_TILE = 32
_MIX_TILE = 1024


class Tiles(NamedTuple):
    """Pairs in the order of their experts [P] int32, and for each tile [tiles] int32 its expert,
    its first pair in that order, and the end of its expert's pairs. A tile without pairs begins at
    that end.
    """

    order: Tensor
    experts: Tensor
    firsts: Tensor
    ends: Tensor


def mix_experts(
    x: Tensor,
    experts: Experts,
    stacks: tuple[Tensor | PlaneWeight, Tensor | PlaneWeight],
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute the weighted sum of the chosen experts' results for each row of x [T, hidden].

    `gate` computes [n, inner] from gates and gated values. Twin: `worker.ops.experts.mix_experts`.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    chosen, shares = experts.route(x)
    count = len(experts.gate_up)
    sizes = count, triton.cdiv(chosen.numel(), count)
    choice = cache(partial(cut, chosen, count))
    both = gate(multiply(x, stacks[0], *sizes, choice, experts.per_token))
    parts, mixed = multiply(both, stacks[1], *sizes, choice, 1), torch.empty_like(x)
    grid = (x.shape[0], triton.cdiv(x.shape[1], _MIX_TILE))
    _mix_kernel[grid](parts, shares, mixed, x.shape[1], per_token=experts.per_token, tile=_MIX_TILE)
    return mixed


def tile_rows(dtype: torch.dtype) -> int:
    return _FLOAT32_TILE if dtype is torch.float32 else _TILE_ROWS


def tile_columns(dtype: torch.dtype) -> int:
    return _FLOAT32_TILE if dtype is torch.float32 else _TILE_COLUMNS


def tile_inner(dtype: torch.dtype) -> int:
    return _FLOAT32_TILE if dtype is torch.float32 else _TILE_INNER


def cut(chosen: Tensor, num_experts: int, size: int) -> Tiles:
    """Cut the choice of each row [T, per_token] int64 into tiles of up to `size` pairs, without
    waiting for the device.
    """
    pairs = chosen.flatten()
    # Each expert with pairs has at most one tile that is not full.
    most = len(pairs) // size + min(num_experts, len(pairs))
    order = pairs.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    pair_ends = counts.cumsum(0)
    tiles = (counts + size - 1) // size
    tile_ends = tiles.cumsum(0)
    numbers = torch.arange(most, device=pairs.device)
    owners = torch.searchsorted(tile_ends, numbers, right=True).clamp_(max=num_experts - 1)
    ends = pair_ends.index_select(0, owners)
    # The first tile of each expert, if all tiles before it were full.
    shifts = pair_ends - counts - (tile_ends - tiles) * size
    firsts = torch.minimum(shifts.index_select(0, owners) + numbers * size, ends)
    return Tiles(order.int(), owners.int(), firsts.int(), ends.int())


def multiply(
    x: Tensor,
    weights: Tensor | PlaneWeight,
    count: int,
    each: int,
    choice: Callable[[int], Tiles],
    per_row: int,
) -> Tensor:
    """Return the product of each pair [P, N]: row pair // `per_row` of x times the matrix of its
    expert, of `count`. `choice` has pairs in tiles of a size; an expert has `each` on average.
    """
    if isinstance(weights, PlaneWeight):
        size = planes.tile(x.dtype, each)
        tiles = choice(size[0])
        out = x.new_empty(tiles.order.shape[0], weights.outputs // count)
        planes.launch(x, weights, out, size, weights.spans, tiles, per_row)
        return out
    _, width, inner = weights.shape
    rows, columns = tile_rows(x.dtype), tile_columns(x.dtype)
    tiles = choice(rows)
    out = x.new_empty(tiles.order.shape[0], width)
    _grouped_kernel[(tiles.experts.shape[0], triton.cdiv(width, columns))](
        *(x, weights, out, *tiles, width, inner, x.stride(0)),
        per_row=per_row,
        tile_rows=rows,
        tile_columns=columns,
        tile_inner=tile_inner(x.dtype),
        product=product_type(x),
    )
    return out


@triton.jit
def _grouped_kernel(  # noqa: PLR0913, PLR0917
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    stride_x: tl.tensor,
    per_row: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_inner: tl.constexpr,
    product: tl.constexpr,
) -> None:
    first = tl.load(firsts + tl.program_id(0))
    end = tl.load(ends + tl.program_id(0))
    if first >= end:
        return
    index = first + tl.arange(0, tile_rows)
    real = index < end
    pairs = tl.load(order + index, mask=real, other=0)
    rows = (pairs // per_row).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = columns < width
    matrix = weights + tl.load(experts + tl.program_id(0)).to(tl.int64) * width * inner
    matrix += columns.to(tl.int64)[None, :] * inner
    own = x + (rows * stride_x)[:, None]
    acc = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, inner, tile_inner):
        along = start + tl.arange(0, tile_inner)
        within = along < inner
        left = tl.load(own + along[None, :], mask=real[:, None] & within[None, :], other=0.0)
        right = tl.load(matrix + along[:, None], mask=within[:, None] & inside[None, :], other=0.0)
        # Triton multiplies float32 in TF32 by default, with 10 bits of mantissa.
        acc += tl.dot(left.to(product), right.to(product), input_precision="ieee")
    places = out + (pairs.to(tl.int64) * width)[:, None] + columns[None, :]
    tl.store(places, acc, mask=real[:, None] & inside[None, :])


@triton.jit
def _mix_kernel(
    parts: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    per_token: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = columns < width
    acc = tl.zeros((tile,), tl.float32)
    for place in tl.static_range(per_token):
        pair = row * per_token + place
        part = tl.load(parts + pair * width + columns, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(shares + pair) * part
    tl.store(out + row * width + columns, acc, mask=inside)
