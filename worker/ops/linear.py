"""Matrix product with a constant weight: y = x Wᵀ + b, optionally + residual.

On a CPU the weight is laid out once for oneDNN: 2 to 6 times faster for a few rows than
`torch.nn.functional.linear`, and a row's result does not depend on the number of rows (but see
`_LONE_ROW_LIMIT`; and with AMX, one element in thousands of a bfloat16 product does).
"""

import logging
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.ops.cpu.native import CpuKernels, stored

logger = logging.getLogger(__name__)

# The row count that selects the layout. A hint of 1 selects a matrix-vector layout, whose sums run
# in another order than the layout for every other row count.
_LAYOUT_ROWS = 16
# For more input features than this, oneDNN splits the sum of a lone row over the cores.
_LONE_ROW_LIMIT = 1024


class Linear(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute x [T, in] → [T, out], plus `residual` [T, out] if given."""

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows [n, in] of the weight at `indices` [n] int64."""


def make_linear(
    weight: Tensor, bias: Tensor | None = None, kernels: CpuKernels | None = None
) -> Linear:
    """Prepare weight [out, in] and bias [out] for the fastest product; `kernels` need float32."""
    if kernels is not None:
        linear = kernels.linear([stored(weight)], None if bias is None else bias.float())
        if linear is not None:
            return linear
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has packed products of `dtype` on this CPU: for bfloat16 only with
    AVX-512 or AVX-NE-CONVERT, and only if `ONEDNN_MAX_CPU_ISA` allows these.
    """
    if not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def supported_dtype(asked: torch.dtype, device: torch.device, packs_bfloat16: bool) -> torch.dtype:
    """Return `asked`, or float32 for bfloat16 on a CPU that cannot pack it, and log the change.

    torch multiplies bfloat16 on any CPU, but takes four times as long as for float32 there.
    """
    if asked is not torch.bfloat16 or device.type != "cpu" or packs_bfloat16:
        return asked
    logger.warning("this CPU has no fast bfloat16 products: --dtype bfloat16 runs in float32")
    return torch.float32


def make_rounded_linear(weight: Tensor, kernels: CpuKernels | None = None) -> Linear:
    """Make a product without bias, in bfloat16 if the weight is float32 and a CPU multiplies
    bfloat16: it reads half as much memory, and rounds inputs and results. With `kernels`, only the
    weight is rounded.
    """
    if kernels is not None:
        return make_linear(weight.to(torch.bfloat16), kernels=kernels)
    is_slow = weight.device.type == "cpu" and weight.dtype is torch.float32
    if is_slow and fast_dtype(weight.device) is torch.bfloat16:
        return RoundedLinear(weight)
    return make_linear(weight)


def fast_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # The first call checks the CPU, the second the limits set for oneDNN.
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() and can_pack(torch.bfloat16)
    return torch.bfloat16 if has_bfloat16 else torch.float32


class DenseLinear:
    """A product by the device's own library."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight.index_select(0, indices)


class PackedLinear:
    """oneDNN's product on a weight in oneDNN's blocked layout, the residual added in its epilogue.

    Float32 stays float32; bfloat16 multiplies pairs and accumulates in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = bias
        self._split_lone_row = weight.shape[1] > _LONE_ROW_LIMIT
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        lone = self._split_lone_row and x.shape[0] == 1
        if lone:
            # Two rows are not split, so a lone row gets the sums that it gets in a batch.
            x = x.expand(2, -1).contiguous()
            residual = None if residual is None else residual.expand(2, -1).contiguous()
        if residual is None:
            y: Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        else:
            y = self._linear_add(x, residual, self._weight, self._bias, "add")
        return y[:1] if lone else y

    def rows(self, indices: Tensor) -> Tensor:
        dense: Tensor = self._weight.to_dense()
        return dense.index_select(0, indices)


class RoundedLinear:
    """A product in bfloat16; inputs and results have the dtype of `weight`."""

    def __init__(self, weight: Tensor) -> None:
        self._inner = make_linear(weight.to(torch.bfloat16))
        self._dtype = weight.dtype

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self._inner(x.to(torch.bfloat16)).to(self._dtype)
        return y if residual is None else y.add_(residual)

    def rows(self, indices: Tensor) -> Tensor:
        return self._inner.rows(indices).to(self._dtype)
