"""Products with weights in four or eight bits, decoded tile by tile.

A program computes a tile of rows by outputs, and reads the inputs a tile at a time, each inside one
group. Codes, minus their zeros, are small integers or float8 numbers, which every multiplied type
holds exactly; the scale of the group is applied to the sum in float32.

A row's sum runs over the inputs in order. Few rows use narrow tiles, so that many programs read the
weight.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.quantized import PAIRED_COLUMNS, Encoding, PackedWeight
from worker.ops.triton.attention import product_type

# Rows and outputs of a tile: for few rows, for many, and for float32, which needs many registers.
_FEW = (16, 32)
_MANY = (64, 128)
_FLOAT32 = (32, 32)


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply x [T, in], in the order of the codes, by a weight: [T, out] in x's type.

    Twin: `worker.ops.quantized.multiply`, which, unlike this, rounds the weight to x's type.
    """
    width, inner = weight.shape
    out = x.new_empty(len(x), width)
    if not len(x):
        return out
    tile_rows, tile_columns = _FEW if len(x) <= _FEW[0] else _MANY
    if x.dtype is torch.float32:
        tile_rows, tile_columns = _FLOAT32
    is_paired = weight.encoding is Encoding.UINT4
    is_wide = is_paired or weight.group % PAIRED_COLUMNS == 0 or weight.group >= inner
    _product_kernel[(triton.cdiv(len(x), tile_rows), triton.cdiv(width, tile_columns))](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        out,
        len(x),
        width,
        inner,
        weight.group,
        x.stride(0),
        is_paired=is_paired,
        is_float=weight.encoding is Encoding.FLOAT8,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        tile_inner=PAIRED_COLUMNS if is_wide else PAIRED_COLUMNS // 2,
        product=product_type(x),
    )
    return out


# Rows differ between steps, and must not compile the kernel again.
@triton.jit(do_not_specialize=("rows",))
def _product_kernel(  # noqa: PLR0913, PLR0917
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    group: tl.tensor,
    stride_x: tl.tensor,
    is_paired: tl.constexpr,
    is_float: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_inner: tl.constexpr,
    product: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    real, inside = row < rows, columns < width
    own = x + (row * stride_x)[:, None]
    acc = tl.zeros((tile_rows, tile_columns), tl.float32)
    if is_paired:
        half: tl.constexpr = tile_inner // 2
        along = tl.arange(0, half)
        for start in range(0, inner, tile_inner):
            places = (start // 2 + along).to(tl.int64)[:, None] * width + columns[None, :]
            pairs = tl.load(codes + places, mask=inside[None, :], other=0)
            for part in tl.static_range(2):
                first = start + part * half
                left = tl.load(own + (first + along)[None, :], mask=real[:, None], other=0.0)
                shared = (first // group).to(tl.int64) * width + columns
                zero = tl.load(zeros + shared, mask=inside, other=0).to(tl.float32)
                scale = tl.load(scales + shared, mask=inside, other=0.0).to(tl.float32)
                right = ((pairs >> 4 * part) & 15).to(tl.float32) - zero[None, :]
                sums = tl.dot(left.to(product), right.to(product), input_precision="ieee")
                acc += sums * scale[None, :]
    else:
        for start in range(0, inner, tile_inner):
            along = start + tl.arange(0, tile_inner)
            within = along < inner
            places = along.to(tl.int64)[:, None] * width + columns[None, :]
            bits = tl.load(codes + places, mask=within[:, None] & inside[None, :], other=0)
            left = tl.load(own + along[None, :], mask=real[:, None] & within[None, :], other=0.0)
            shared = (start // group).to(tl.int64) * width + columns
            scale = tl.load(scales + shared, mask=inside, other=0.0).to(tl.float32)
            if is_float:
                # Sign, exponent and mantissa at float16's positions, with 8 less in the exponent:
                # this works on GPUs without the type.
                wide = bits.to(tl.uint16)
                placed = ((wide & 128) << 8) | ((wide & 127) << 7)
                right = placed.to(tl.float16, bitcast=True).to(product)
                scale *= 256.0
            else:
                zero = tl.load(zeros + shared, mask=inside, other=0).to(tl.float32)
                right = (bits.to(tl.float32) - zero[None, :]).to(product)
            sums = tl.dot(left.to(product), right, input_precision="ieee")
            acc += sums * scale[None, :]
    places = out + (row * width)[:, None] + columns[None, :]
    tl.store(places, acc, mask=real[:, None] & inside[None, :])
