"""Products with weights that stay in four or eight bits: decoded while they are multiplied.

The columns of a weight [out, in] fall into groups, and the columns of one group share a scale and a
zero point in each row: weight = (code - zero) · scale. Codes are unsigned integers, or float8
(e4m3) numbers, which have no zeros. Every row has its own scales, so weights from several tensors
are fused by concatenating their rows.

If a checkpoint's groups are spread over the columns (GPTQ's "act order"), the columns are sorted by
group, and the inputs are put into the same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Columns whose codes share bytes: the first half in the low bits, the second half in the high bits.
PAIRED_COLUMNS = 64
# A kernel multiplies at least this number of columns at a time, all of one group.
_MULTIPLE = 32
_NOT_A_NUMBER = 127  # a float8 number's bits without its sign
_PIECE_ELEMENTS = 1 << 18


class Encoding(Enum):
    UINT4 = 4
    UINT8 = 8
    FLOAT8 = "e4m3"


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Rows of a weight as a checkpoint has them, unpacked, on the CPU.

    `codes` [out, in] are uint8, or float8_e4m3fn for FLOAT8; `scales` [out, groups] have any float
    type; `zeros` [out, groups] uint8, None for FLOAT8; `groups` [in] int64 has each column's group.
    """

    encoding: Encoding
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor

    def take(self, rows: Sequence[int]) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[rows]
        return GroupedWeight(self.encoding, self.codes[rows], self.scales[rows], zeros, self.groups)

    def decode(self) -> Tensor:
        values = torch.empty(self.codes.shape)
        self.decode_into(values)
        return values

    def decode_into(self, destination: Tensor) -> None:
        step = max(1, _PIECE_ELEMENTS // max(1, self.codes.shape[1]))
        for start in range(0, len(self.codes), step):
            rows = slice(start, start + step)
            values = self.codes[rows].float()
            if self.zeros is not None:
                values -= self.zeros[rows].float()[:, self.groups]
            values *= self.scales[rows].float()[:, self.groups]
            destination[rows] = values


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the layout of a product.

    `codes` are uint8: bits [in, out], or for UINT4 [in / 2, out], where a byte has the codes of two
    columns `PAIRED_COLUMNS` / 2 apart. `scales` [groups, out] and `zeros` [groups, out] uint8 apply
    to `group` columns each; the last group may have fewer. With an `order` [in] int64, column n of
    the codes belongs to the input `order[n]`.
    """

    encoding: Encoding
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        inputs = len(self.codes) * (2 if self.encoding is Encoding.UINT4 else 1)
        return self.codes.shape[1], inputs

    def decode(self, outputs: Tensor | None = None) -> Tensor:
        """Return the weight, or some of its outputs, in the order of the codes: [in, out]."""

        def chosen(part: Tensor) -> Tensor:
            return part if outputs is None else part.index_select(1, outputs)

        codes = chosen(self.codes)
        if self.encoding is Encoding.UINT4:
            pairs = codes.view(-1, PAIRED_COLUMNS // 2, codes.shape[1])
            codes = torch.cat((pairs & 15, pairs >> 4), dim=1).view(-1, codes.shape[1])
        elif self.encoding is Encoding.FLOAT8:
            codes = codes.view(torch.float8_e4m3fn)
        groups = torch.arange(len(codes), device=codes.device) // self.group
        values = codes.float()
        if self.zeros is not None:
            values -= chosen(self.zeros).float().index_select(0, groups)
        return values.mul_(chosen(self.scales).float().index_select(0, groups))


def pack(parts: Sequence[GroupedWeight], device: torch.device) -> PackedWeight | None:
    """Pack fused weights for products. None: encodings or groups differ, a weight is NaN, or there
    are several groups whose size is not a multiple of `_MULTIPLE`.
    """
    first = parts[0]
    inputs = first.codes.shape[1]
    is_uniform = all(
        part.encoding is first.encoding and torch.equal(part.groups, first.groups) for part in parts
    )
    order = first.groups.argsort(stable=True)
    ordered = first.groups[order]
    ordered = ordered - ordered[0]
    group = int((ordered == 0).sum())
    is_regular = torch.equal(ordered, torch.arange(inputs) // group)
    if not is_uniform or not is_regular or (group % _MULTIPLE and group < inputs):
        return None
    if first.encoding is Encoding.UINT4 and (inputs % PAIRED_COLUMNS or group % _MULTIPLE):
        return None
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    # The kernel decodes bits alone, and would read NaN as 480.
    if first.encoding is Encoding.FLOAT8 and bool((codes & 127 == _NOT_A_NUMBER).any()):
        return None
    is_sorted = torch.equal(order, torch.arange(inputs))
    codes = (codes if is_sorted else codes[:, order]).T
    if first.encoding is Encoding.UINT4:
        halves = codes.reshape(-1, 2, PAIRED_COLUMNS // 2, codes.shape[1])
        codes = (halves[:, 0] | halves[:, 1] << 4).view(-1, codes.shape[1])
    # A shard's scales and zeros have the groups of all columns.
    used = slice(int(first.groups.min()), int(first.groups.max()) + 1)

    def joined(all_: Sequence[Tensor]) -> Tensor:
        return torch.cat([each[:, used] for each in all_]).T.contiguous().to(device)

    zeros = [part.zeros for part in parts if part.zeros is not None]
    return PackedWeight(
        first.encoding,
        codes.contiguous().to(device),
        joined([part.scales for part in parts]),
        joined(zeros) if zeros else None,
        group,
        None if is_sorted else order.to(device),
    )


Product = Callable[[Tensor, PackedWeight], Tensor]


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply x [T, in] by a weight, decoded whole and rounded to x's type."""
    return x @ weight.decode().to(x.dtype)


def choose_product(device: torch.device) -> Product | None:
    """Choose a kernel or its torch twin; None on a CPU, where loading decodes the weights."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if find_spec("triton") is None:
        logger.warning(
            "Triton is not installed (`pip install '.[gpu]'`): torch decodes the quantised"
            " weights in every step, which is slow"
        )
        return multiply
    return cast(Product, import_module("worker.ops.triton.quantized").multiply)


class QuantizedLinear:
    """A product with a packed weight and bias [out]; implements `Linear`."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, product: Product) -> None:
        self.weight = weight
        self._bias = bias
        self._product = product

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        y = self._product(x, self.weight)
        if self._bias is not None:
            y = y.add_(self._bias)
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        values = self.weight.decode(indices).T
        if self.weight.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.weight.order, values)
