"""Weights of GGUF files that stay packed on a GPU, as planes of codes, scales and minimums.

Theory of operation. A file's block holds the codes of 32 or 256 columns of a row and, between
them, their scales. Here each kind of number has a plane of its own, so that a tile of a product
reads whole words. A row's columns fall into spans, and a span into parts of 16 or 32 columns, all
of which share a scale:

    weight = (code - zero) · scale + minimum

Word w of a span has the low bits of the codes of column w of each part, the first part lowest. So
one load of consecutive words gives consecutive columns of all parts. Codes of 5 and 6 bits have a
second plane, of their high bits, in the same order. Scales and minimums are stored part by part,
each for all outputs.

No number is rounded: the K encodings keep their scales and minimums of 6 or 8 bits, beside those of
their super-blocks of 256 columns, since the products of both do not fit half precision.

Source of the blocks: ggml's `ggml-common.h`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SUPER_COLUMNS = 256  # of the K encodings' blocks
_WORD_BITS = 32
# Weights that are packed at a time: their codes briefly take a byte each.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Layout:
    """The planes of an encoding: the low `bits` of a code have a place in a word, `high_bits` more
    a place in a second plane; each `part` of columns has a scale.
    """

    bits: int = 4
    high_bits: int = 0
    part: int = 32
    zero: int = 0

    @property
    def parts(self) -> int:
        """The parts of a span."""
        return _WORD_BITS // self.bits

    @property
    def span(self) -> int:
        """The columns of a span."""
        return self.parts * self.part


class _Unpacked(NamedTuple):
    """Numbers of blocks: codes [n, columns] uint8; scales, and what is added, [n, groups]; those of
    the super-block [n, 1], if it has any.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _bits(raw: Tensor) -> Tensor:
    """Unpack bytes [n, m] to bits [n, m, 8], the lowest first."""
    return raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=raw.device) & 1


def _unpack(raw: Tensor, bits: int, has_minimum: bool) -> _Unpacked:
    """Unpack blocks of 32: a scale, a minimum, fifth bits of all codes, and codes."""
    scales, raw = _half(raw[:, :2]), raw[:, 2:]
    if bits == 8:
        return _Unpacked(raw ^ 128, scales)  # from two's complement
    minimums = None
    if has_minimum:
        minimums, raw = _half(raw[:, :2]), raw[:, 2:]
    if bits == 4:
        return _Unpacked(_nibbles(raw), scales, minimums)
    return _Unpacked(_nibbles(raw[:, 4:]) | _bits(raw[:, :4]).flatten(1) << 4, scales, minimums)


def _unpack_k(raw: Tensor, bits: int) -> _Unpacked:
    """Unpack Q4_K or Q5_K: pairs of 6 bits in 12 bytes, of which the first four scales and minimums
    are contiguous; their spare bits are the upper ones of the other four.
    """
    low, high, split = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((low & 63, (split & 15) | (low >> 6 << 4)), dim=1)
    minimums = torch.cat((high & 63, (split >> 4) | (high >> 6 << 4)), dim=1)
    codes = _nibbles(raw[:, -128:].reshape(-1, 4, 32)).flatten(1)
    if bits == 5:
        codes |= _bits(raw[:, 16:48]).transpose(1, 2).flatten(1) << 4
    # What minimums are multiplied with is negated, so that all encodings add.
    return _Unpacked(codes, scales, minimums, _half(raw[:, :2]), -_half(raw[:, 2:4]))


def _unpack_q6_k(raw: Tensor) -> _Unpacked:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(4, 1)
    high = raw[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8)
    return _Unpacked(low | high.flatten(1) << 4, scales, None, _half(raw[:, 208:]))


# The columns of a block, the layout of its planes, and the function that unpacks blocks.
_ENCODINGS: dict[str, tuple[int, Layout, Callable[[Tensor], _Unpacked]]] = {
    "Q4_0": (32, Layout(zero=8), partial(_unpack, bits=4, has_minimum=False)),
    "Q4_1": (32, Layout(), partial(_unpack, bits=4, has_minimum=True)),
    "Q5_0": (32, Layout(high_bits=1, zero=16), partial(_unpack, bits=5, has_minimum=False)),
    "Q5_1": (32, Layout(high_bits=1), partial(_unpack, bits=5, has_minimum=True)),
    "Q8_0": (32, Layout(bits=8, zero=128), partial(_unpack, bits=8, has_minimum=False)),
    "Q4_K": (SUPER_COLUMNS, Layout(), partial(_unpack_k, bits=4)),
    "Q5_K": (SUPER_COLUMNS, Layout(high_bits=1), partial(_unpack_k, bits=5)),
    "Q6_K": (SUPER_COLUMNS, Layout(high_bits=2, part=16, zero=32), _unpack_q6_k),
}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Rows of a weight as a GGUF file has them: blocks [out, blocks, bytes] of the type
    `type_name`. `is_cut` if the wanted columns do not begin and end with blocks.
    """

    type_name: str
    data: npt.NDArray[np.uint8]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class PlaneWeight:
    """A weight [out, `inputs`] in planes; columns up to the end of the last span have scales of 0.

    `codes` [out, spans · part] int32; `high` of the same shape, 1 or 2 bytes each, or None;
    `scales` and `minimums` (or None) [groups, out]; where these are not half precision, those of
    the super-blocks [inputs / 256, out] float16.
    """

    layout: Layout
    inputs: int
    codes: Tensor
    high: Tensor | None
    scales: Tensor
    minimums: Tensor | None
    super_scales: Tensor | None
    super_minimums: Tensor | None

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def spans(self) -> int:
        return self.codes.shape[1] // self.layout.part

    @property
    def planes(self) -> tuple[Tensor | None, ...]:
        rows = self.codes, self.high, self.scales, self.minimums
        return (*rows, self.super_scales, self.super_minimums)

    def part(self, first: int, stop: int) -> PlaneWeight:
        """Return the outputs from `first` to before `stop`, in the same memory."""
        planes: list[Any] = [
            None if plane is None else plane[first:stop] if index < 2 else plane[:, first:stop]
            for index, plane in enumerate(self.planes)
        ]
        return PlaneWeight(self.layout, self.inputs, *planes)

    def decode(self) -> Tensor:
        """Return the weight [out, inputs] float32: the numbers that llama.cpp decodes."""
        how = self.layout
        codes = _unwoven(self.codes, how, how.bits)
        if self.high is not None:
            codes |= _unwoven(self.high, how, how.high_bits) << how.bits
        values = codes.float().sub_(how.zero).flatten(1, 2)  # [out, groups, part]
        values *= _by_group(self.scales, self.super_scales, how)
        if self.minimums is not None:
            values += _by_group(self.minimums, self.super_minimums, how)
        return values.flatten(1)[:, : self.inputs]


def _by_group(plane: Tensor, supers: Tensor | None, how: Layout) -> Tensor:
    values = plane.float()
    if supers is not None:
        values *= supers.float().repeat_interleave(SUPER_COLUMNS // how.part, dim=0)
    return values.T.unsqueeze(-1)


def _woven(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, spans, parts, part] to bytes [n, spans, part, parts · bits / 8]."""
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).view(-1, 1)
    placed = codes.view(*codes.shape[:2], -1, per_byte, codes.shape[-1]) << shifts
    return placed.sum(3, dtype=torch.uint8).transpose(2, 3).contiguous()


def _unwoven(plane: Tensor, how: Layout, bits: int) -> Tensor:
    """Reverse `_woven`: codes [n, spans, parts, part] uint8."""
    packed = (
        plane.contiguous().view(torch.uint8).view(len(plane), -1, how.part, how.parts * bits // 8)
    )
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device).view(-1, 1)
    codes = packed.transpose(2, 3).unsqueeze(3) >> shifts & (1 << bits) - 1
    return codes.flatten(2, 3)


def pack(parts: Sequence[BlockWeight], device: torch.device) -> list[PlaneWeight] | None:
    """Pack fused weights, one for each run of parts in the same encoding. None: a part is in an
    encoding without planes, or is cut.
    """
    if any(part.type_name not in _ENCODINGS or part.is_cut for part in parts):
        return None
    runs = groupby(parts, key=lambda part: part.type_name)
    return [_pack_run(name, [part.data for part in run], device) for name, run in runs]


def _pack_run(
    type_name: str, parts: Sequence[npt.NDArray[np.uint8]], device: torch.device
) -> PlaneWeight:
    columns, how, unpack = _ENCODINGS[type_name]
    inputs = parts[0].shape[1] * columns
    step = max(1, _PIECE_ELEMENTS // inputs)
    pieces = []
    for data in parts:
        for start in range(0, len(data), step):
            # A copy: the file's memory is not writable.
            raw = torch.from_numpy(np.array(data[start : start + step])).to(device)
            pieces.append(_planes_of(unpack(raw.flatten(0, 1)), how, len(raw)))
    planes: list[Any] = [
        # Planes by row are stacked as they are, those by output beside each other.
        None if same[0] is None else torch.cat(same, dim=0 if index < 2 else 1)
        for index, same in enumerate(zip(*pieces, strict=True))
    ]
    return PlaneWeight(how, inputs, *planes)


def _planes_of(blocks: _Unpacked, how: Layout, rows: int) -> tuple[Tensor | None, ...]:
    codes = blocks.codes.view(rows, -1)
    short = -codes.shape[1] % how.span
    codes = torch.nn.functional.pad(codes, (0, short)).view(rows, -1, how.parts, how.part)
    # The padding's scales are 0, whatever its codes.
    lacking = short // how.part
    low = _woven(codes & (1 << how.bits) - 1, how.bits).view(torch.int32).view(rows, -1)
    high = None
    if how.high_bits:
        high = _woven(codes >> how.bits, how.high_bits)
        high = (high.view(torch.int16) if how.high_bits == 2 else high).view(rows, -1)

    def across(plane: Tensor | None, more: int = 0) -> Tensor | None:
        if plane is None:
            return None
        return torch.nn.functional.pad(plane.view(rows, -1).T, (0, 0, 0, more)).contiguous()

    supers = across(blocks.super_scales), across(blocks.super_minimums)
    return low, high, across(blocks.scales, lacking), across(blocks.minimums, lacking), *supers


class PlaneKernels(Protocol):
    """The products of a device; see `worker.ops.triton.planes`."""

    def multiply(self, x: Tensor, weight: PlaneWeight, out: Tensor) -> None: ...

    def decode(
        self, weight: PlaneWeight, out: Tensor, outputs: Tensor | None = None, first: int = 0
    ) -> None: ...


def choose_planes(device: torch.device) -> PlaneKernels | None:
    """Choose kernels. None without Triton and on a CPU, where loading decodes the weights."""
    is_compiled = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if not is_compiled or find_spec("triton") is None:
        return None
    return cast("PlaneKernels", import_module("worker.ops.triton.planes"))


class PlanesLinear:
    """A product with fused weights and bias [out]; implements `Linear`. `rows` have `dtype`."""

    def __init__(
        self,
        weights: Sequence[PlaneWeight],
        bias: Tensor | None,
        kernels: PlaneKernels,
        dtype: torch.dtype,
    ) -> None:
        self.weights = weights
        self._bias = bias
        self._kernels = kernels
        self._dtype = dtype
        self._outputs = sum(weight.outputs for weight in weights)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = x.new_empty(len(x), self._outputs)
        start = 0
        for weight in self.weights:
            self._kernels.multiply(x, weight, y[:, start : start + weight.outputs])
            start += weight.outputs
        if self._bias is not None:
            y = y.add_(self._bias)
        return y if residual is None else y.add_(residual)

    def part(self, first: int, stop: int) -> PlanesLinear:
        """Return the product with some outputs of the first weight, in its memory, without bias."""
        return PlanesLinear([self.weights[0].part(first, stop)], None, self._kernels, self._dtype)

    def rows(self, indices: Tensor) -> Tensor:
        if len(self.weights) > 1:  # of fused weights; steps read the embedding alone
            every = torch.cat([weight.decode() for weight in self.weights])
            return every.index_select(0, indices).to(self._dtype)
        shape = len(indices), self.weights[0].inputs
        rows = torch.empty(shape, dtype=self._dtype, device=indices.device)
        self._kernels.decode(self.weights[0], rows, indices)
        return rows
