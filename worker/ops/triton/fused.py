"""The parts of a layer other than products and attention, each in one pass over its rows: norms,
gated activation, and rotation of queries and keys with the write to the KV cache.

The kernels compute in float32, and round when they write.
"""

# Triton's decorators have no types.
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.backends import HeadNorms
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors

_TILE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write x [T, H] / rms(x) · weight [H] to `out`. Twin: `worker.ops.backends.rms_norm`."""
    rows, width = x.shape
    if rows:
        tile = triton.next_power_of_2(width)
        strides = (x.stride(0), out.stride(0))
        _rms_norm_kernel[(rows,)](x, weight, out, eps, width, *strides, tile=tile)


def gated_mul(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """Compute silu(gate) · up [T, I] of gate_up [T, 2 · I]: gates, then gated values. For "gelu" it
    is gelu(gate) · up, by tanh: gate / (1 + exp(-2u)), with u = sqrt(2 / pi) (g + 0.044715 g³).
    """
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        tile = min(_TILE, triton.next_power_of_2(width))
        _gated_mul_kernel[(rows, triton.cdiv(width, tile))](
            gate_up, out, width, gate_up.stride(0), out.stride(0), tile=tile, gate=gate
        )
    return out


def rotate_and_write(
    qkv: Tensor,
    cache: Tensor,
    step: StepTensors,
    rope: RopeTable | None,
    norms: HeadNorms | None = None,
    scales: Tensor | None = None,
) -> None:
    """Rotate the queries of qkv [T, (heads + 2 · kv_heads) · head_dim] in place, and write its
    keys, rotated, and its values into one layer's cache at `step.slots`, without duplicates.

    cache [num_blocks, 2, kv_heads, block_size, head_dim]; for float8_e4m3fn, keys and values are
    divided by scales [2, kv_heads] float32, and larger results saturate at 448. `rope` is the table
    of all positions; None: no rotation. The keys and values in qkv stay unchanged. Twins:
    `worker.ops.rope.apply_rope_` and `worker.ops.paged_attention.write_kv`.
    """
    _, _, kv_heads, block_size, head_dim = cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if not len(qkv):
        return
    _rotate_and_write_kernel[(len(qkv), kv_heads)](
        qkv,
        cache,
        step.positions,
        step.slots,
        None if rope is None else rope.cos,
        None if rope is None else rope.sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        scales,
        0.0 if norms is None else norms.eps,
        qkv.stride(0),
        *cache.stride()[:3],
        sharing=heads // kv_heads,
        padded_sharing=triton.next_power_of_2(heads // kv_heads),
        half=head_dim // 2,
        padded_half=triton.next_power_of_2(head_dim // 2),
        block_size=block_size,
        is_eight_bits=cache.dtype is torch.float8_e4m3fn,
    )


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, tile)
    inside = columns < width
    values = tl.load(x + row * stride_x + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, wide * scale * weights, mask=inside)


@triton.jit
def _gated_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride_gate_up: tl.tensor,
    stride_out: tl.tensor,
    tile: tl.constexpr,
    gate: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = columns < width
    gates = gate_up + row * stride_gate_up + columns
    x = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, gated(x, up, gate), mask=inside)


@triton.jit
def gated(x: tl.tensor, up: tl.tensor, gate: tl.constexpr) -> Any:
    """Return silu(x) · up or gelu(x) · up, by the name of the gate, of float32 values."""
    steep = x
    if gate == "gelu":
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 · sqrt(2 / pi)
    return x / (1.0 + tl.exp(-steep)) * up


@triton.jit
def _normalize(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,
) -> Any:
    """Divide the halves [rows, padded half] of heads by their rms; multiply by the weight."""
    squares = tl.sum(first * first + second * second, axis=1)
    scale = (1.0 / tl.sqrt(squares / (2 * half) + eps))[:, None]
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32)
    return first * scale * weights[None, :], second * scale * others[None, :]


@triton.jit
def _rotate(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    half: tl.constexpr,
) -> Any:
    """Rotate the halves [rows, padded half] of heads by one row of the tables."""
    cos_first = tl.load(cos + columns, mask=inside, other=0.0)[None, :]
    cos_second = tl.load(cos + half + columns, mask=inside, other=0.0)[None, :]
    sin_first = tl.load(sin + columns, mask=inside, other=0.0)[None, :]
    sin_second = tl.load(sin + half + columns, mask=inside, other=0.0)[None, :]
    return first * cos_first + second * sin_first, second * cos_second + first * sin_second


@triton.jit
def _eight_bits(values: tl.tensor) -> Any:
    """Round float32 values to the numbers of float8_e4m3fn, ties to even, at most 448.

    The following cast then has nothing to round, which Triton's interpreter does wrongly: a power
    of two times a number of at most 4 bits is exact.
    """
    values = tl.where(values == values, tl.clamp(values, -448.0, 448.0), values)
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # At and below the smallest normal number, steps are equal: 2^-9.
    step = tl.maximum(power, 0.015625) * 0.125
    # Beside 1.5 · 2^23 float32 has no fraction: the sum is rounded, ties to even.
    rounded = (values / step + 12582912.0) - 12582912.0
    return rounded * step


# These begin anywhere in a packed tensor, which must not compile the kernel again.
@triton.jit(do_not_specialize_on_alignment=("positions", "slots"))
def _rotate_and_write_kernel(  # noqa: PLR0913, PLR0917
    qkv: tl.tensor,
    cache: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    stride_row: tl.tensor,
    stride_block: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    sharing: tl.constexpr,
    padded_sharing: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    block_size: tl.constexpr,
    is_eight_bits: tl.constexpr,
) -> None:
    """Process the query heads of one KV head of a row, its key and its value."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    columns = tl.arange(0, padded_half)
    inside = columns < half
    own = qkv + row * stride_row
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row)
    place = cache + (slot // block_size).to(tl.int64) * stride_block + kv_head * stride_head
    place += (slot % block_size) * (2 * half)
    if cos is not None:
        cos += position * (2 * half)
        sin += position * (2 * half)

    if (query_norm is not None) | (cos is not None):
        sharers = tl.arange(0, padded_sharing)
        at = own + ((kv_head * sharing + sharers) * (2 * half))[:, None] + columns[None, :]
        mask = (sharers < sharing)[:, None] & inside[None, :]
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        if query_norm is not None:
            first, second = _normalize(first, second, query_norm, columns, inside, eps, half)
        if cos is not None:
            first, second = _rotate(first, second, cos, sin, columns, inside, half)
        tl.store(at, first, mask=mask)
        tl.store(at + half, second, mask=mask)

    for plane in tl.static_range(2):
        head = kv_heads * (sharing + plane) + kv_head
        at = own + head * (2 * half) + columns[None, :]
        mask = inside[None, :]
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        if plane == 0:
            if key_norm is not None:
                first, second = _normalize(first, second, key_norm, columns, inside, eps, half)
            if cos is not None:
                first, second = _rotate(first, second, cos, sin, columns, inside, half)
        if scales is not None:
            scale = tl.load(scales + plane * kv_heads + kv_head)
            first, second = first / scale, second / scale
        if is_eight_bits:
            first, second = _eight_bits(first), _eight_bits(second)
        to = place + plane * stride_plane + columns[None, :]
        tl.store(to, first.to(cache.dtype.element_ty), mask=mask)
        tl.store(to + half, second.to(cache.dtype.element_ty), mask=mask)
