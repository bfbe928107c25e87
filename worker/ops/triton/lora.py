"""LoRA adapters as grouped products (SGMV, Chen et al., arXiv:2310.18547).

The adapters of all slots are stored in stacks, two for each product of a layer; smaller ranks are
padded with zeros. The rows of a step are sorted by slot and cut into tiles, on the device, once a
step (see `experts`). A tile is multiplied by its slot's down matrix and then by the up matrix, and
the result is added in place; each part of a fused product has its own slice of both sides.

Tiles have one size, and sums run over the inner features in order, so a row's numbers depend
neither on the rows that share its tile nor on their number.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.lora import AdapterFactors, Factors, Owners, Product
from worker.ops.step import StepAdapters, sent
from worker.ops.triton import experts
from worker.ops.triton.attention import product_type

_TILE_INNER = 32


@dataclass(frozen=True, slots=True)
class _Stack:
    """A product's adapters: down [slots, parts · rank, in] and up [slots, out, rank]."""

    sizes: tuple[int, ...]
    down: Tensor
    up: Tensor

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

        self._device = device
        self._num_slots = num_slots
        self._tile_rows = experts.tile_rows(dtype)
        self._layers = [
            {
                name: _Stack(
                    product.sizes,
                    zeros(len(product.sizes) * max_rank, product.inputs),
                    zeros(sum(product.sizes), max_rank),
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
        # Rows without an adapter come last, in tiles that are emptied.
        own = torch.where(owners < 0, count, owners).long()
        tiles = experts.cut(own, count + 1, self._tile_rows)
        firsts = torch.where(tiles.experts == count, tiles.ends, tiles.firsts)
        return _StackedStep(self._layers, replace(tiles, firsts=firsts))


@dataclass(frozen=True, slots=True)
class _StackedStep:
    """The tiles of one step with the stacks; implements `StepAdapters`."""

    layers: Sequence[Mapping[str, _Stack]]
    tiles: experts.Tiles
    native: None = None

    def add(self, layer: int, product: str, x: Tensor, y: Tensor) -> None:
        stack = self.layers[layer][product]
        small = x.new_empty(len(x), stack.down.shape[1])
        experts.multiply(x, stack.down, self.tiles, 1, small)
        add_up(small, stack.up, self.tiles, stack.sizes, y)


def add_up(
    small: Tensor, up: Tensor, tiles: experts.Tiles, sizes: Sequence[int], y: Tensor
) -> None:
    """Add to rows of y [T, out] the products of small [T, parts · rank] with the matrices of their
    slots, of up [slots, out, rank]; each part separately.
    """
    _, width, rank = up.shape
    columns = experts.tile_columns(small.dtype)
    first = 0
    for place, size in enumerate(sizes):
        _add_kernel[(len(tiles.experts), triton.cdiv(size, columns))](
            small.narrow(1, place * rank, rank),
            up.narrow(1, first, size),
            y.narrow(1, first, size),
            tiles.order,
            tiles.experts,
            tiles.firsts,
            tiles.ends,
            size,
            width * rank,
            rank,
            small.stride(0),
            y.stride(0),
            tile_rows=experts.tile_rows(small.dtype),
            tile_columns=columns,
            tile_inner=_TILE_INNER,
            product=product_type(small),
        )
        first += size


@triton.jit
def _add_kernel(  # noqa: PLR0913, PLR0917
    small: tl.tensor,
    up: tl.tensor,
    y: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    size: tl.tensor,
    stride_slot: tl.tensor,
    rank: tl.tensor,
    stride_small: tl.tensor,
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
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = columns < size
    matrix = up + tl.load(slots + tl.program_id(0)).to(tl.int64) * stride_slot
    matrix += columns.to(tl.int64)[None, :] * rank
    own = small + (rows * stride_small)[:, None]
    acc = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, rank, tile_inner):
        along = start + tl.arange(0, tile_inner)
        within = along < rank
        left = tl.load(own + along[None, :], mask=real[:, None] & within[None, :], other=0.0)
        right = tl.load(matrix + along[:, None], mask=within[:, None] & inside[None, :], other=0.0)
        acc += tl.dot(left.to(product), right.to(product), input_precision="ieee")
    places = y + (rows * stride_y)[:, None] + columns[None, :]
    mask = real[:, None] & inside[None, :]
    tl.store(places, tl.load(places, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)
