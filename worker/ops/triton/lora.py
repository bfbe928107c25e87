"""LoRA adapters as grouped products (SGMV, Chen et al., arXiv:2310.18547).

The adapters of all slots are stored in stacks, two for each product of a layer; smaller ranks are
padded with zeros. The rows of a step are sorted by slot and cut into tiles, on the device, once a
step (see `experts`). A tile is multiplied by its slot's down matrix and then by the up matrix, and
the result is added in place; each part of a fused product has its own slice of both sides.

A product down has few outputs and many inputs, so its sums are split: a program for each split of
the inputs, for few rows, or one for all of them. Tiles and splits have one size, and sums are added
up in order, so a row's numbers depend neither on the rows that share its tile nor on their number.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.lora import AdapterFactors, Factors, Owners, Product
from worker.ops.step import StepAdapters, sent
from worker.ops.triton import experts
from worker.ops.triton.attention import product_type

# Inputs of a split, and the most splits, above which they have more inputs.
_SPLIT, _MAX_SPLITS = 512, 16
# Rows of a step up to which every split has a program of its own.
_SPLIT_ROWS = 1024
# The least side of a tensor core's product, and the ranks of most adapters.
_LEAST = 16


@dataclass(frozen=True, slots=True)
class _Stack:
    """A product's adapters: down [slots, parts · rank, in] and up [slots, out, rank]. `columns`
    [tiles, 3] int32 are the tiles of outputs: its first, the end of its part, and the row of down
    where the part begins.
    """

    sizes: tuple[int, ...]
    down: Tensor
    up: Tensor
    columns: Tensor

    def fill(self, slot: int, factors: Factors) -> None:
        row, most = 0, self.up.shape[2]
        for place, (size, part) in enumerate(zip(self.sizes, factors.parts, strict=True)):
            if part is not None:
                first, rank = place * most, len(part[0])
                self.down[slot, first : first + rank].copy_(part[0])
                self.up[slot, row : row + size, :rank].copy_(part[1])
            row += size


class StackedAdapters:
    """Implements `AdapterStore` on a GPU, and on a CPU in Triton's interpreter.

    Slots have room for adapters of `max_rank`; `layers` are the products of each layer.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        layers: Sequence[Mapping[str, Product]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(num_slots, rows, columns, dtype=dtype, device=device)

        def columns(sizes: tuple[int, ...]) -> Tensor:
            places = enumerate(zip(sizes, accumulate(sizes), strict=True))
            tiles = [
                (first, end, place * max_rank)
                for place, (size, end) in places
                for first in range(end - size, end, experts.tile_columns(dtype))
            ]
            return torch.tensor(tiles, dtype=torch.int32, device=device)

        self._device = device
        self._num_slots = num_slots
        self._tile_rows = experts.tile_rows(dtype)
        self._layers = [
            {
                name: _Stack(
                    product.sizes,
                    zeros(len(product.sizes) * max_rank, product.inputs),
                    zeros(sum(product.sizes), max_rank),
                    columns(product.sizes),
                )
                for name, product in layer.items()
            }
            for layer in layers
        ]

    def prepared(self, layers: AdapterFactors) -> Any:
        return layers

    def put(self, slot: int, prepared: Any) -> None:
        for index, stacks in enumerate(self._layers):
            for name, stack in stacks.items():
                # A smaller rank, or an adapter without the product, leaves numbers of the old one.
                stack.down[slot].zero_()
                stack.up[slot].zero_()
                factors = None if prepared is None else prepared[index].get(name)
                if factors is not None:
                    stack.fill(slot, factors)

    def plan(self, owners: Owners) -> StepAdapters:
        return self.plan_rows(sent(owners, self._device))

    def plan_rows(self, owners: Tensor) -> StepAdapters:
        count = self._num_slots
        # Rows without an adapter come last, in tiles that are emptied. (`where` would copy a number
        # from the host, which no capture allows.)
        own = owners.long().masked_fill_(owners < 0, count)
        tiles = experts.cut(own, count + 1, self._tile_rows)
        firsts = torch.where(tiles.experts == count, tiles.ends, tiles.firsts)
        return _StackedStep(self._layers, tiles._replace(firsts=firsts))


@dataclass(frozen=True, slots=True)
class _StackedStep:
    """The tiles of one step with the stacks; implements `StepAdapters`."""

    layers: Sequence[Mapping[str, _Stack]]
    tiles: experts.Tiles
    native: None = None

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        stack, tiles = self.layers[layer][product], self.tiles
        small = shrink(x, stack.down, tiles)
        _add_kernel[(len(tiles.experts), len(stack.columns))](
            *(small, stack.up, y, tiles.order, tiles.experts, tiles.firsts, tiles.ends),
            *(stack.columns, *small.shape, y.shape[1], stack.up.shape[2], y.stride(0)),
            tile_rows=experts.tile_rows(y.dtype),
            tile_columns=experts.tile_columns(y.dtype),
            tile_inner=_LEAST,
            product=product_type(y),
        )


def shrink(x: Tensor, down: Tensor, tiles: experts.Tiles) -> Tensor:
    """Return the products of x [T, in] with the matrices of the rows' slots, of down [slots, width,
    in], as float32 [sums, T, width] that remain to be added up; rows in no tile are undefined.
    """
    (count, inner), width = x.shape, down.shape[1]
    most = experts.tile_columns(x.dtype)
    columns = max(_LEAST, min(most, triton.next_power_of_2(width)))
    split = max(_SPLIT, triton.cdiv(inner, _MAX_SPLITS * _SPLIT) * _SPLIT)
    splits = triton.cdiv(inner, split)
    # With many rows there are programs enough, and each adds up all splits, in the same order.
    sums = splits if count <= _SPLIT_ROWS else 1
    small = x.new_empty(sums, count, width, dtype=torch.float32)
    _down_kernel[(len(tiles.experts), triton.cdiv(width, columns), sums)](
        *(x, down, small, tiles.order, tiles.experts, tiles.firsts, tiles.ends),
        *(count, width, inner, x.stride(0), split, splits // sums),
        tile_rows=experts.tile_rows(x.dtype),
        tile_columns=columns,
        tile_inner=experts.tile_inner(x.dtype),
        product=product_type(x),
    )
    return small


@triton.jit(do_not_specialize=("count", "num_splits"))
def _down_kernel(  # noqa: PLR0913, PLR0917
    x: tl.tensor,
    down: tl.tensor,
    small: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    stride_x: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
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
    rows = tl.load(order + index, mask=real, other=0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = columns < width
    matrix = down + tl.load(slots + tl.program_id(0)).to(tl.int64) * width * inner
    matrix += columns.to(tl.int64)[None, :] * inner
    own = x + (rows * stride_x)[:, None]
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for number in range(num_splits):
        begin = (tl.program_id(2) * num_splits + number) * split
        acc = tl.zeros((tile_rows, tile_columns), tl.float32)
        for start in range(begin, tl.minimum(begin + split, inner), tile_inner):
            along = start + tl.arange(0, tile_inner)
            within = along < inner
            left = tl.load(own + along[None, :], mask=real[:, None] & within[None, :], other=0.0)
            right = tl.load(
                matrix + along[:, None], mask=within[:, None] & inside[None, :], other=0.0
            )
            acc += tl.dot(left.to(product), right.to(product), input_precision="ieee")
        total += acc
    places = small + ((tl.program_id(2).to(tl.int64) * count + rows) * width)[:, None]
    tl.store(places + columns[None, :], total, mask=real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("sums", "count"))
def _add_kernel(  # noqa: PLR0913, PLR0917
    small: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    rank: tl.tensor,
    stride_y: tl.tensor,
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
    rows = tl.load(order + index, mask=real, other=0).to(tl.int64)
    part = parts + tl.program_id(1) * 3
    columns = tl.load(part) + tl.arange(0, tile_columns)
    inside = columns < tl.load(part + 1)
    matrix = up + tl.load(slots + tl.program_id(0)).to(tl.int64) * size * rank
    matrix += columns.to(tl.int64)[None, :] * rank
    own = small + (rows * width + tl.load(part + 2))[:, None]
    acc = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, rank, tile_inner):
        along = start + tl.arange(0, tile_inner)
        within = along < rank
        left = tl.zeros((tile_rows, tile_inner), tl.float32)
        for number in range(sums):
            place = own + number * count * width + along[None, :]
            left += tl.load(place, mask=real[:, None] & within[None, :], other=0.0)
        right = tl.load(matrix + along[:, None], mask=within[:, None] & inside[None, :], other=0.0)
        acc += tl.dot(left.to(product), right.to(product), input_precision="ieee")
    places = y + (rows * stride_y)[:, None] + columns[None, :]
    mask = real[:, None] & inside[None, :]
    tl.store(places, tl.load(places, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)
