"""Products with GGUF's weights in planes, decoded while they are multiplied.

A program computes a tile of outputs by rows. It reads a span of words, takes the codes of one part
after the other from them, and multiplies these with the part's inputs on tensor cores: codes are
small integers, which half precision holds exactly. A part's scale is applied to its sum in float32.
What is added to all weights of a part is multiplied with the sum of the part's inputs.

A sum runs over the parts in order. Where a weight has too few outputs to occupy a GPU, the spans
are split among programs, and a second launch adds their sums in order. For up to 16 rows, the
splits follow from the weight's shape alone, so a row does not depend on its batch. Many rows are
multiplied by torch instead, with weights that are decoded a set of outputs at a time.

The weights of a layer's experts are one weight. A tile of rows has pairs of rows and one expert
(see `experts`), whose outputs alone it computes: nothing is split, and nothing decoded beforehand.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.planes import SUPER_COLUMNS, PlaneWeight
from worker.ops.triton.attention import product_type

# The following numbers are estimates: a GPU has to measure them (`benchmarks/gpu.py --packed`).
# Programs that occupy a GPU of some 130 multiprocessors; one split has at least `_MIN_SPANS`.
_PROGRAMS = 128
_MIN_SPANS = 2
# Rows and outputs of a tile, for few rows and for more. Two warps that have 32 outputs exchange
# their scales by shuffles; wider tiles do so in shared memory, and wait.
_VECTOR_TILE = (16, 32)
_TILE = (64, 128)
# For float32, whose products use no tensor cores but many registers.
_FLOAT32_TILE = 32
# With more rows, to decode the weight once costs less than scales on every tile's sums.
_MAX_PACKED_ROWS = 256
_DENSE_ELEMENTS = 1 << 25  # decoded at a time: 64 MiB in half precision
_MERGE_TILE = 1024
_DECODE_TILE = 32
# A float32 number of this size has its lowest bit at the end of its mantissa: 2²³ with an integer
# in its bits is 2²³ plus the integer. This takes fewer instructions than a conversion.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)
_SUPER = tl.constexpr(SUPER_COLUMNS)


def multiply(x: Tensor, weight: PlaneWeight, out: Tensor) -> None:
    """Write x [T, in] times a weight to `out` [T, out], whose rows may have gaps.

    Twin: `PlaneWeight.decode`, multiplied.
    """
    rows, outputs = len(x), weight.outputs
    if rows > _MAX_PACKED_ROWS:
        _multiply_dense(x, weight, out)
        return
    if not rows:
        return
    tile_rows, tile_outputs = size = tile(x.dtype, rows)
    programs = triton.cdiv(rows, tile_rows) * triton.cdiv(outputs, tile_outputs)
    splits = max(1, min(_PROGRAMS // programs, weight.spans // _MIN_SPANS))
    each = triton.cdiv(weight.spans, splits)
    splits = triton.cdiv(weight.spans, each)
    sums = out
    if splits > 1:
        sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    launch(x, weight, sums, size, each)
    if splits > 1:
        _merge_kernel[(rows, triton.cdiv(outputs, _MERGE_TILE))](
            *(sums, out, rows, outputs, splits, out.stride(0)), tile=_MERGE_TILE
        )


def tile(dtype: torch.dtype, rows: int) -> tuple[int, int]:
    """Return the rows and outputs of a tile, where `rows` are multiplied by the same weight."""
    tile_rows, tile_outputs = _VECTOR_TILE if rows <= _VECTOR_TILE[0] else _TILE
    if dtype is torch.float32:
        return min(tile_rows, _FLOAT32_TILE), _FLOAT32_TILE
    return tile_rows, tile_outputs


def launch(
    x: Tensor,
    weight: PlaneWeight,
    out: Tensor,
    size: tuple[int, int],
    each: int,
    tiles: tuple[Tensor | None, ...] = (None,) * 4,
    per_row: int = 1,
) -> None:
    """Write products of the rows of x, in splits of `each` spans, to `out` [splits, T, N]. With
    `experts.Tiles`, write those of pairs [P, N]: row pair // `per_row` of x times the matrix of its
    expert, of a weight [experts · N, in]. `size` is a `tile`'s.
    """
    rows, outputs, (tile_rows, tile_outputs) = len(x), out.shape[-1], size
    is_vector = tile_rows == _VECTOR_TILE[0]
    num_tiles = triton.cdiv(rows, tile_rows) if tiles[1] is None else len(tiles[1])
    grid = num_tiles, triton.cdiv(outputs, tile_outputs), triton.cdiv(weight.spans, each)
    _product_kernel[grid](
        *(x, *weight.planes, out, *tiles, rows, outputs, weight.scales.stride(0)),
        *(weight.inputs, each, x.stride(0), out.stride(-2)),
        **_layout(weight),
        per_row=per_row,
        tile_rows=tile_rows,
        tile_outputs=tile_outputs,
        product=product_type(x),
        num_warps=2 if is_vector else 8,
        num_stages=5 if is_vector else 2,
    )


def _multiply_dense(x: Tensor, weight: PlaneWeight, out: Tensor) -> None:
    step = max(1, _DENSE_ELEMENTS // weight.inputs)
    for start in range(0, weight.outputs, step):
        count = min(step, weight.outputs - start)
        dense = x.new_empty(count, weight.inputs)
        decode(weight, dense, first=start)
        torch.mm(x, dense.T, out=out[:, start : start + count])


def decode(weight: PlaneWeight, out: Tensor, outputs: Tensor | None = None, first: int = 0) -> None:
    """Write rows of a weight to `out` [n, in]: the `outputs` [n], or n rows from `first`.

    Twin: `PlaneWeight.decode`.
    """
    if not len(out):
        return
    _decode_kernel[(triton.cdiv(len(out), _DECODE_TILE), weight.spans)](
        *(*weight.planes, outputs, out, first, len(out), weight.scales.stride(0), weight.inputs),
        **_layout(weight),
        tile_outputs=_DECODE_TILE,
    )


def _layout(weight: PlaneWeight) -> dict[str, int]:
    how = weight.layout
    return {"bits": how.bits, "high_bits": how.high_bits, "part": how.part, "zero": how.zero}


@triton.jit
def _codes(
    words: tl.tensor,
    high: tl.tensor,
    number: tl.constexpr,
    bits: tl.constexpr,
    high_bits: tl.constexpr,
    zero: tl.constexpr,
) -> Any:
    """Return the codes of a part, less the zero: float32 in the shape of the words."""
    # A code stays in its half of the word: half of a word fits the mantissa.
    shift: tl.constexpr = number * bits // 16 * 16
    offset: tl.constexpr = number * bits % 16
    code = (words >> shift) & (((1 << bits) - 1) << offset)
    if high_bits:
        right: tl.constexpr = number * high_bits - bits - offset
        mask: tl.constexpr = ((1 << high_bits) - 1) << (bits + offset)
        if right >= 0:
            code |= (high >> right) & mask
        else:
            code |= (high << (0 - right)) & mask
    step: tl.constexpr = 1.0 / (1 << offset)
    return (code | _MAGIC_BITS).to(tl.float32, bitcast=True) * step - (_MAGIC * step + zero)


@triton.jit
def _shared(
    plane: tl.tensor, group: tl.tensor, columns: tl.tensor, stride: tl.tensor, inside: tl.tensor
) -> Any:
    """Return the scales or minimums of a group of columns, float32 for each output."""
    place = plane + group.to(tl.int64) * stride + columns
    return tl.load(place, mask=inside, other=0).to(tl.float32)


# Rows differ between steps, and must not compile the kernel again.
@triton.jit(do_not_specialize=("rows", "each"))
def _product_kernel(  # noqa: PLR0912, PLR0913, PLR0917
    x: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    super_scales: tl.tensor,
    super_minimums: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    each: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    bits: tl.constexpr,
    high_bits: tl.constexpr,
    part: tl.constexpr,
    zero: tl.constexpr,
    per_row: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    product: tl.constexpr,
) -> None:
    parts: tl.constexpr = 32 // bits
    spans = tl.cdiv(inner, parts * part)
    places = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    inside, columns = places < outputs, places
    if order is None:
        row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
        real = row < rows
    else:
        first_pair = tl.load(firsts + tl.program_id(0))
        end = tl.load(ends + tl.program_id(0))
        if first_pair >= end:
            return
        pair = first_pair + tl.arange(0, tile_rows)
        real = pair < end
        row = tl.load(order + pair, mask=real, other=0).to(tl.int64)
        columns = places + tl.load(experts + tl.program_id(0)) * outputs
    along = tl.arange(0, part)
    own_x = x + (row // per_row * stride_x)[None, :]
    own = (columns.to(tl.int64) * spans * part)[:, None] + along[None, :]
    first = tl.program_id(2) * each
    acc = tl.zeros((tile_outputs, tile_rows), tl.float32)
    for number in range(first, tl.minimum(first + each, spans)):
        words = tl.load(codes + own + number * part, mask=inside[:, None], other=0)
        upper = words
        if high_bits:
            upper = tl.load(high + own + number * part, mask=inside[:, None], other=0).to(tl.int32)
        block = number * parts * part // _SUPER
        if super_scales is not None:
            super_scale = _shared(super_scales, block, columns, stride, inside)
        if super_minimums is not None:
            super_minimum = _shared(super_minimums, block, columns, stride, inside)
        for index in tl.static_range(parts):
            group = number * parts + index
            place = group * part + along
            within = (place < inner)[:, None] & real[None, :]
            right = tl.load(own_x + place[:, None], mask=within, other=0.0).to(product)
            left = _codes(words, upper, index, bits, high_bits, zero).to(product)
            scale = _shared(scales, group, columns, stride, inside)
            if super_scales is not None:
                scale *= super_scale
            acc += tl.dot(left, right, input_precision="ieee") * scale[:, None]
            if minimums is not None:
                added = _shared(minimums, group, columns, stride, inside)
                if super_minimums is not None:
                    added *= super_minimum
                if tile_rows <= 16 and product != tl.float32:
                    # Tensor cores are idle beside the memory, and warps need not wait.
                    ones = tl.full((tile_outputs, part), 1.0, product)
                    acc += tl.dot(ones, right) * added[:, None]
                else:
                    acc += tl.sum(right.to(tl.float32), axis=0)[None, :] * added[:, None]
    target = out + ((tl.program_id(2) * rows + row) * stride_out)[None, :] + places[:, None]
    tl.store(target, acc, mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=("rows", "splits"))
def _merge_kernel(
    sums: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    splits: tl.tensor,
    stride_out: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = columns < outputs
    acc = tl.zeros((tile,), tl.float32)
    for split in range(splits):
        acc += tl.load(sums + (split * rows + row) * outputs + columns, mask=inside, other=0.0)
    tl.store(out + row * stride_out + columns, acc, mask=inside)


@triton.jit(do_not_specialize=("first", "count"), do_not_specialize_on_alignment=("chosen",))
def _decode_kernel(  # noqa: PLR0913, PLR0917
    codes: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    super_scales: tl.tensor,
    super_minimums: tl.tensor,
    chosen: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    inner: tl.tensor,
    bits: tl.constexpr,
    high_bits: tl.constexpr,
    part: tl.constexpr,
    zero: tl.constexpr,
    tile_outputs: tl.constexpr,
) -> None:
    parts: tl.constexpr = 32 // bits
    row = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    inside = row < count
    columns = (first + row).to(tl.int64)
    if chosen is not None:
        columns = tl.load(chosen + row, mask=inside, other=0).to(tl.int64)
    along, number = tl.arange(0, part), tl.program_id(1)
    own = ((columns * tl.cdiv(inner, parts * part) + number) * part)[:, None] + along[None, :]
    words = tl.load(codes + own, mask=inside[:, None], other=0)
    upper = words
    if high_bits:
        upper = tl.load(high + own, mask=inside[:, None], other=0).to(tl.int32)
    block = number * parts * part // _SUPER
    for index in tl.static_range(parts):
        group = number * parts + index
        scale = _shared(scales, group, columns, stride, inside)
        if super_scales is not None:
            scale *= _shared(super_scales, block, columns, stride, inside)
        value = _codes(words, upper, index, bits, high_bits, zero) * scale[:, None]
        if minimums is not None:
            added = _shared(minimums, group, columns, stride, inside)
            if super_minimums is not None:
                added *= _shared(super_minimums, block, columns, stride, inside)
            value += added[:, None]
        place = group * part + along
        places = out + (row.to(tl.int64) * inner)[:, None] + place[None, :]
        tl.store(places, value, mask=inside[:, None] & (place < inner)[None, :])
