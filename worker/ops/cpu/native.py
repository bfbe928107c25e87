"""The library of kernels: found, checked against the CPU, and called by ctypes.

A wheel has kernels for AVX-512, for AVX2, and for four lanes elsewhere; a clone has kernels for its
own CPU (`scripts/build_kernels.py`). All sets compute the same numbers to the bit, and a row's
numbers do not depend on its batch, so a worker gives the same answers on every CPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.errors import ConfigError
from worker.ops.noise import Stream
from worker.ops.rope import RopeTable
from worker.ops.step import StepTensors

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent  # of the library
# One of _ISAS: the kernels to use instead of the best ones for the CPU.
ISA_VARIABLE = "POINTSMAN_CPU_ISA"
_ISAS = ("avx512", "avx2", "portable")  # the best first
_REBUILD = "build all with POINTSMAN_KERNEL_ISAS=all pip install --no-deps --editable ."
_ALIGNMENT = 64  # bytes: a line of the cache, and a vector
_MAX_HEAD_DIM = 256
_MAX_SHARING = 64

# The types of GGML that can be repacked, by name; docs: ggml's `enum ggml_type`.
GGML_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
_BLOCK, _SUPER_BLOCK = 32, 256  # elements; the second in types named …_K
_DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("format", "rows", "cols", "first")),
        *((name, c_void_p) for name in ("data", "bias")),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        ("parts", _Matrix * 3),  # at most queries, keys and values
        *((name, c_int32) for name in ("count", "rows", "cols", "reserved")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int32) for name in ("rotates", "window")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner")),
        *((name, c_int32) for name in ("block_size", "is_bfloat16", "int8")),
        ("eps", c_float),
    )


class _Pair(ctypes.Structure):
    _fields_ = (("down", _Linear), ("up", _Linear))


class _Adapter(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("pairs", "rows")),
        *((name, c_int32) for name in ("count", "reserved")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "query_starts", "context_lens")),
        ("block_tables", c_void_p),
        *((name, c_int32) for name in ("tokens", "sequences", "table_width", "first_position")),
        ("adapters", c_void_p),
        *((name, c_int32) for name in ("adapter_count", "layer")),
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of a GGML type, row by row. With `heads`, the rows of a head's halves alternate."""

    type_name: str
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]
    heads: int = 0

    def part(self, rows: slice, columns: slice, num_rows: int | None = None) -> Stored | None:
        """Return a part, of whole heads where there are some, with rows of zeros up to `num_rows`.
        Both slices have a start and a stop. None: blocks would be cut.
        """
        size = _SUPER_BLOCK if self.type_name.endswith("_K") else _BLOCK
        size = 1 if self.type_name in _DENSE.values() else size
        if columns.start % size or columns.stop % size:
            return None
        blocks = self.data.reshape(self.rows, self.cols // size, -1)
        own = blocks[rows, columns.start // size : columns.stop // size]
        more = (num_rows or len(own)) - len(own)
        own = np.concatenate((own, np.zeros((more, *own.shape[1:]), np.uint8))) if more else own
        heads = self.heads * len(own) // self.rows
        width = columns.stop - columns.start
        return Stored(self.type_name, len(own), width, own.reshape(-1), heads)


def stored(weight: Tensor) -> Stored:
    rows, cols = weight.shape
    data = weight.contiguous().view(torch.uint8).numpy().reshape(-1)
    return Stored(_DENSE[weight.dtype], rows, cols, data)


def open_kernels(num_threads: int, int8_activations: bool = False) -> CpuKernels | None:
    """Open the kernels for this CPU; if there are none, log a line and return None. Raises
    `ConfigError` for a requested instruction set that the CPU has and the build has not.
    """
    library, isa = _library(FOLDER), os.environ.get(ISA_VARIABLE, "")
    if library is None:
        logger.warning("the native kernels are not built (that takes a C++ compiler): using torch")
        return None
    engine = library.pointsman_open(num_threads, isa.encode())
    if engine is None and library.pointsman_runs(isa.encode()):
        raise ConfigError(
            f"{ISA_VARIABLE}={isa}: the CPU runs these kernels, but they are not built: {_REBUILD}"
        )
    if engine is None:
        wanted = f"{ISA_VARIABLE}={isa}" if isa else "kernels"
        logger.warning("no native kernels exist for this CPU (%s): using torch", wanted)
        return None
    name = library.pointsman_isa(isa.encode()).decode()
    best = next(known for known in _ISAS if library.pointsman_runs(known.encode()))
    if not isa and name != best:
        logger.warning(
            "using %s kernels, since those for %s are not built: %s", name, best, _REBUILD
        )
    return CpuKernels(library, engine, name, int8_activations)


@functools.cache
def _library(folder: Path) -> ctypes.CDLL | None:
    path = folder / "_kernels.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    results = {"open": c_void_p, "isa": c_char_p, "packed_bytes": c_int64}
    for name, arguments in {
        "isa": (c_char_p,),
        "runs": (c_char_p,),
        "open": (c_int, c_char_p),
        "close": (c_void_p,),
        "packed_bytes": (c_int, c_int, c_int),
        "format": (c_int,),
        "pack": (c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_int),
        "rows": (c_void_p, c_void_p, c_int, c_void_p),
        "linear": (*(c_void_p,) * 3, c_int, c_void_p, c_void_p, c_int),
        "norm": (*(c_void_p,) * 4, c_int, c_int, c_float),
        "layers": (*(c_void_p,) * 2, c_int, *(c_void_p,) * 5, c_int64, c_void_p),
        "sample": (
            *(c_void_p, c_void_p, c_int64),
            *(c_void_p, c_void_p, c_int64, c_void_p),
            *(c_uint64, c_uint64),
        ),
    }.items():
        function = getattr(library, f"pointsman_{name}")
        function.argtypes, function.restype = arguments, results.get(name, c_int)
    return library


class CpuKernels:
    """Kernels with their threads, which sleep between steps; calls wait for each other."""

    def __init__(self, library: ctypes.CDLL, engine: int, isa: str, int8_activations: bool) -> None:
        self.isa = isa
        self.library = library
        self.engine = engine
        self.int8 = int(int8_activations)

    def __del__(self) -> None:
        self.library.pointsman_close(self.engine)

    def linear(self, parts: Sequence[Stored], bias: Tensor | None = None) -> BlockLinear | None:
        """Make a product of stacked `parts`; None: a type or scale cannot be repacked."""
        joined = _Linear(count=0, rows=sum(p.rows for p in parts), cols=parts[0].cols)
        # The library stores addresses alone: the product keeps the memory behind them alive.
        held: list[object] = [bias]
        for part in _joined(parts):
            matrix = self._pack(part, held)
            if matrix is None:
                return None
            matrix.first = sum(m.rows for m in joined.parts[: joined.count])
            matrix.bias = None if bias is None else bias.data_ptr() + 4 * matrix.first
            joined.parts[joined.count] = matrix
            joined.count += 1
        return BlockLinear(self, joined, held)

    def _pack(self, parts: Sequence[Stored], held: list[object]) -> _Matrix | None:
        code = GGML_TYPES.get(parts[0].type_name, -1)
        rows, cols = sum(p.rows for p in parts), parts[0].cols
        size = self.library.pointsman_packed_bytes(code, rows, cols)
        if size < 0:
            return None
        memory = np.zeros(size + _ALIGNMENT, np.uint8)
        data = memory.ctypes.data + -memory.ctypes.data % _ALIGNMENT
        held.append(memory)
        first = 0
        for part in parts:
            source = part.data.ctypes.data
            good = self.library.pointsman_pack(
                code, source, part.rows, cols, data, first, part.heads
            )
            if not good:
                return None
            first += part.rows
        return _Matrix(self.library.pointsman_format(code), rows, cols, 0, data, None)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x [T, H] / rms(x) · weight [H], float32. Twin: `backends.rms_norm`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self.library.pointsman_norm(
            self.engine, x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps
        )
        return y


def _joined(parts: Sequence[Stored]) -> list[list[Stored]]:
    runs: list[list[Stored]] = []
    for part in parts:
        if runs and runs[-1][0].type_name == part.type_name:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


class BlockLinear:
    """A product with weights in blocks and float32 activations; implements `Linear`. The weights
    are exactly those of the blocks, and a row's sum runs over the columns in order.
    """

    def __init__(self, kernels: CpuKernels, layer: _Linear, held: list[object]) -> None:
        self.kernels = kernels
        self.layer = layer
        self._held = held
        self._address = ctypes.addressof(layer)

    @property
    def shape(self) -> tuple[int, int]:
        return self.layer.rows, self.layer.cols

    @property
    def num_bytes(self) -> int:
        return sum(held.nbytes for held in self._held if isinstance(held, np.ndarray))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), self.layer.rows)
        added = None if residual is None else residual.contiguous()
        self.kernels.library.pointsman_linear(
            self.kernels.engine,
            self._address,
            x.data_ptr(),
            len(x),
            None if added is None else added.data_ptr(),
            y.data_ptr(),
            self.kernels.int8,
        )
        return y

    def rows(self, indices: Tensor) -> Tensor:
        numbers = indices.to(torch.int32).contiguous()
        rows = torch.empty(*numbers.shape, self.layer.cols)
        self.kernels.library.pointsman_rows(
            self._address, numbers.data_ptr(), numbers.numel(), rows.data_ptr()
        )
        return rows


class AdapterLayers:
    """The LoRA part of the products of native layers: for each layer, by product, the pair of
    products that x passes through, down and up.
    """

    PRODUCTS = ("qkv", "output", "gate_up", "down")

    def __init__(self, layers: Sequence[Mapping[str, tuple[BlockLinear, BlockLinear]]]) -> None:
        self._held = layers
        self._pairs = (_Pair * (len(layers) * len(self.PRODUCTS)))()
        for index, layer in enumerate(layers):
            for product, (down, up) in layer.items():
                place = index * len(self.PRODUCTS) + self.PRODUCTS.index(product)
                self._pairs[place] = _Pair(down.layer, up.layer)

    def address_of(self, layer: int) -> int:
        return ctypes.addressof(self._pairs[layer * len(self.PRODUCTS)])


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a decoder layer, and the epsilon of its norms."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def is_supported(self) -> bool:
        return self.head_dim <= _MAX_HEAD_DIM and self.heads // self.kv_heads <= _MAX_SHARING


class NativeLayers:
    """Decoder layers that run in one call. The cache stores keys as [head_dim, block_size], so that
    one vector holds an element of many positions; only these kernels may read or write such a
    cache.
    """

    def __init__(
        self,
        shape: LayerShape,
        linears: Sequence[Sequence[BlockLinear]],
        norms: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
        rotates: Sequence[bool],
        windows: Sequence[int | None],
    ) -> None:
        """Each layer has `linears` (qkv, output, gate_up, down), `norms` in float32 (of the input,
        the MLP's input, queries, keys), and in `windows` the number of positions that a row sees.
        """
        self._kernels = linears[0][0].kernels
        self._held = (linears, norms)
        self._layers = (_Layer * len(linears))()
        for index, (products, weights) in enumerate(zip(linears, norms, strict=True)):
            pointers = (None if norm is None else norm.data_ptr() for norm in weights)
            layers = (linear.layer for linear in products)
            self._layers[index] = _Layer(*pointers, *layers, rotates[index], windows[index] or 0)
        self._shape = _Shape(
            linears[0][0].layer.cols,
            *(shape.heads, shape.kv_heads, shape.head_dim),
            linears[0][3].layer.cols,
            *(0, 0, self._kernels.int8),
            shape.eps,
        )

    def run(
        self, x: Tensor, rope: RopeTable, cache: Tensor, step: StepTensors, layers: range
    ) -> Tensor:
        """Pass x [T, hidden] through successive `layers`, in place; write the step's keys and
        values into cache [layers, num_blocks, 2, kv_heads, block_size, head_dim], float32 or
        bfloat16. `rope` is the table of all positions.
        """
        first, shape = layers.start, self._shape
        shape.block_size, shape.is_bfloat16 = cache.shape[4], cache.dtype is torch.bfloat16
        arrays = (step.positions, step.slots, step.query_starts, step.context_lens)
        groups = () if step.adapters is None else step.adapters.native
        adapters = (_Adapter * len(groups))()
        for index, (own, rows) in enumerate(groups):
            adapters[index] = _Adapter(own.address_of(first), rows.data_ptr(), len(rows))
        native = _Step(
            *(array.data_ptr() for array in (*arrays, step.block_tables)),
            len(step.token_ids),
            *step.block_tables.shape,
            step.first_position,
            ctypes.addressof(adapters),
            len(groups),
        )
        self._kernels.library.pointsman_layers(
            self._kernels.engine,
            ctypes.addressof(self._layers) + first * ctypes.sizeof(_Layer),
            len(layers),
            ctypes.addressof(shape),
            ctypes.addressof(native),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            cache.data_ptr() + first * cache.stride(0) * cache.itemsize,
            cache.stride(0) * cache.itemsize,
            x.data_ptr(),
        )
        return x


class NativeDraws:
    """Implements `DrawKernel` with the threads of `kernels`, a row at a time."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def __call__(
        self, logits: Tensor, adjusted: Tensor | None, draws: npt.NDArray[np.void], stream: Stream
    ) -> Tensor:
        """Draw by a table of `DRAWS`; tensors are contiguous and on the CPU."""
        ids = stream.token_ids
        self._kernels.library.pointsman_sample(
            self._kernels.engine,
            *(draws.ctypes.data, len(draws)),
            logits.data_ptr(),
            None if adjusted is None else adjusted.data_ptr(),
            logits.shape[1],
            None if ids is None else ids.data_ptr(),
            *(int(stream.purpose), stream.offset),
        )
        return torch.from_numpy(np.stack((draws["token"], draws["state"])))
