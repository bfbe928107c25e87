"""Products of few rows with dense weights, together with what comes before and after them in a
layer: the norm of the inputs, the gated activation, the residual. For a small model the launches of
separate kernels take longer than reading its weights.

A program computes a tile of outputs for all rows on tensor cores; with an activation, the tile has
gates and the values that they multiply. Where a weight has too few outputs to occupy a GPU, its
inputs are split among programs. Each leaves its sums in float32, and the last of a tile to arrive
adds them up in the order of the splits, whichever it is. Splits follow from the weight's shape
alone, and a tile has the same size for any number of rows, so a row does not depend on its batch.

Numbers are rounded to the type of `x` where the separate kernels round them: after the norm, after
the product, and after the activation or the residual.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.backends import Around
from worker.ops.triton.attention import product_type
from worker.ops.triton.fused import gated

# The following numbers are estimates: a GPU has to measure them (`benchmarks/gpu.py --products`).
# Limits, beyond which torch's product is used: the least tile of tensor cores, and a weight that
# takes an H100 20 µs to read in half precision, as long as some launches.
MAX_ROWS = 16
MAX_SIZE = 1 << 25
# Programs that occupy a GPU of some 130 multiprocessors.
PROGRAMS = 256
_MAX_SPLITS = 8
_TILE_OUTPUTS = 32
_TILE_INNER = 128
_FLOAT32_TILE_INNER = 32  # these products use no tensor cores but many registers
_NORM_TILE = tl.constexpr(512)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, around: Around, arrivals: Tensor
) -> Tensor:
    """Compute `Backend.product` of x [T, in], 1 to `MAX_ROWS` rows, and weight [out, in]: [T, out],
    or with an activation [T, out / 2]. `arrivals`, `PROGRAMS` int32, are zero before and after, and
    launches that share them follow one another. Twin: `worker.ops.backends.composed`.
    """
    rows, (width, inner) = x.shape[0], weight.shape
    outputs, residual = width if around.gate is None else width // 2, around.residual
    tile_inner = _FLOAT32_TILE_INNER if x.dtype is torch.float32 else _TILE_INNER
    tiles, spans = triton.cdiv(outputs, _TILE_OUTPUTS), triton.cdiv(inner, tile_inner)
    each = triton.cdiv(spans, max(1, min(PROGRAMS // tiles, _MAX_SPLITS, spans)))
    splits = triton.cdiv(spans, each)
    out = x.new_empty(rows, outputs)
    sums = None if splits == 1 else x.new_empty(splits, rows, width, dtype=torch.float32)
    _product_kernel[(tiles, splits)](
        *(x, around.norm, weight, bias, residual, sums, arrivals, out),
        *(around.eps, rows, outputs, inner, each * tile_inner),
        *(x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0)),
        gate=around.gate,
        splits=splits,
        tile_rows=MAX_ROWS,
        tile_outputs=_TILE_OUTPUTS,
        tile_inner=tile_inner,
        product=product_type(x),
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit
def _inverse_rms(own_x: tl.tensor, real: tl.tensor, inner: tl.tensor, eps: tl.tensor) -> Any:
    """Return 1 / rms of each row, float32. `own_x` [1, rows] are the rows' beginnings."""
    squares = tl.zeros((_NORM_TILE, own_x.shape[1]), tl.float32)
    for start in range(0, inner, _NORM_TILE):
        along = start + tl.arange(0, _NORM_TILE)
        mask = (along < inner)[:, None] & real[None, :]
        values = tl.load(own_x + along[:, None], mask=mask, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / inner + eps)


# Rows differ between steps, and must not compile the kernel again.
@triton.jit(do_not_specialize=("rows",))
def _product_kernel(  # noqa: PLR0913, PLR0917
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inner: tl.tensor,
    each: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    stride_residual: tl.tensor,
    gate: tl.constexpr,
    splits: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inner: tl.constexpr,
    product: tl.constexpr,
) -> None:
    parts: tl.constexpr = 1 if gate is None else 2
    # The gates of the tile's outputs, then the values that they multiply.
    places = tl.arange(0, parts * tile_outputs)
    columns = tl.program_id(0) * tile_outputs + places % tile_outputs
    inside = columns < outputs
    columns += places // tile_outputs * outputs
    row = tl.arange(0, tile_rows)
    real = row < rows
    own_x = x + (row * stride_x)[None, :]
    own_weight = weight + (columns.to(tl.int64) * stride_weight)[:, None]
    if norm is not None:
        scale = _inverse_rms(own_x, real, inner, eps)
    acc = tl.zeros((parts * tile_outputs, tile_rows), tl.float32)
    first = tl.program_id(1) * each
    for start in range(first, tl.minimum(first + each, inner), tile_inner):
        along = start + tl.arange(0, tile_inner)
        within = along < inner
        known = inside[:, None] & within[None, :]
        left = tl.load(own_weight + along[None, :], mask=known, other=0.0)
        right = tl.load(own_x + along[:, None], mask=within[:, None] & real[None, :], other=0.0)
        if norm is not None:
            factors = tl.load(norm + along, mask=within, other=0.0).to(tl.float32)
            normed = right.to(tl.float32) * scale[None, :] * factors[:, None]
            right = normed.to(x.dtype.element_ty)
        # Triton multiplies float32 in TF32 by default, with 10 bits of mantissa.
        acc += tl.dot(left.to(product), right.to(product), input_precision="ieee")
    if splits > 1:
        size = rows * parts * outputs
        at = sums + (row * parts * outputs)[None, :] + columns[:, None]
        mask = inside[:, None] & real[None, :]
        tl.store(at + tl.program_id(1) * size, acc, mask=mask)
        # All threads have stored their sums before one thread publishes them.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tl.program_id(0), 1) < splits - 1:
            return
        tl.store(arrivals + tl.program_id(0), 0)
        acc = tl.zeros((parts * tile_outputs, tile_rows), tl.float32)
        for split in tl.static_range(splits):
            acc += tl.load(at + split * size, mask=mask, other=0.0, cache_modifier=".cg")
    if bias is not None:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    result = acc.to(x.dtype.element_ty).to(tl.float32)
    column = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    mask = (column < outputs)[:, None] & real[None, :]
    if gate is not None:
        both = tl.permute(tl.reshape(result, (2, tile_outputs, tile_rows)), (1, 2, 0))
        gates, values = tl.split(both)
        result = gated(gates, values, gate)
    if residual is not None:
        before = residual + (row * stride_residual)[None, :] + column[:, None]
        result += tl.load(before, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (row * outputs)[None, :] + column[:, None], result, mask=mask)
