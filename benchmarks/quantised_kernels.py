"""One kernel of y = x Wᵀ from GGUF blocks, as Numba and as g++ compile the same loops.

The weights are laid out for vectors of 16 lanes: groups of 16 rows of W, in a group its blocks of
32 weights, in a block one row of words with the float16 scales (and minima, in the high half) and
then rows of words with eight 4-bit or four 8-bit weights each, a word of a row for every row of W.
Sums run in one order whatever the number of rows of x, so a row's result does not depend on it.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LANES = 16
BLOCK = 32
TILES = (8, 4, 1)
SOURCE = Path(__file__).with_suffix(".cpp")

Array = npt.NDArray[Any]
# words, x [m, k], block sums of x [m, k / 32], y [m, n]
Kernel = Callable[[Array, Array, Array, Array], None]


def pack_q4_1(quants: Array, scales: Array, minima: Array) -> Array:
    """[n, k] weights of 0..15, float16 [n, k / 32] → words [n / 16, k / 32, 5, 16]."""
    words = _gathered(quants.astype(np.uint32), 8, 4)
    factors = scales.view(np.uint16).astype(np.uint32)
    factors |= minima.view(np.uint16).astype(np.uint32) << 16
    return _with_factors(words, factors)


def pack_q8_0(quants: Array, scales: Array) -> Array:
    """[n, k] signed weights of a byte, float16 [n, k / 32] → words [n / 16, k / 32, 9, 16]."""
    words = _gathered(quants.view(np.uint8).astype(np.uint32), 4, 8)
    return _with_factors(words, scales.view(np.uint16).astype(np.uint32))


def _gathered(quants: Array, each: int, bits: int) -> Array:
    """`each` neighbours to a word: [n, k] → [n, k / 32, 32 / each]."""
    rows, columns = quants.shape
    parts = quants.reshape(rows, columns // BLOCK, BLOCK // each, each)
    words = np.zeros(parts.shape[:3], np.uint32)
    for index in range(each):
        words |= parts[..., index] << np.uint32(bits * index)
    return words


def _with_factors(words: Array, factors: Array) -> Array:
    rows, blocks, count = words.shape
    both = np.concatenate([factors[:, :, None], words], axis=2)
    grouped = both.reshape(rows // LANES, LANES, blocks, count + 1)
    return np.ascontiguousarray(grouped.transpose(0, 2, 3, 1))


def cpp_kernels(threads: int) -> dict[str, Kernel]:
    """Kernels by format, compiled here by g++ for this CPU. OSError where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared"]
        subprocess.run(["g++", *flags, "-fPIC", str(SOURCE), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))

    def bind(name: str) -> Kernel:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        function.restype = None

        def run(words: Array, x: Array, sums: Array, y: Array) -> None:
            rows, columns = x.shape
            pointers = (words.ctypes.data, x.ctypes.data, sums.ctypes.data, y.ctypes.data)
            function(*pointers, y.shape[1], columns, rows, threads)

        return run

    return {"q4_1": bind("q4_1"), "q8_0": bind("q8_0")}


_TILE = """
def tile(words, x, sums, y):
    total = np.zeros({size}, np.float32)
    part = np.zeros({size}, np.float32)
    for b in range(words.shape[0]):
        for r in range({size}):
            part[r] = np.float32(0)
        for c in range({chunks}):
            at = b * 32 + c * {each}
{loads}
            for r in range(16):
                word = words[b, c + 1, r]
{products}
{sums}
        for r in range(16):
            factors = words[b, 0, r]
            scale = half(factors & np.uint32(0xffff))
{scaled}
    for r in range(16):
{stores}
"""


def _tile_source(format_name: str, rows: int) -> str:
    """The loops over one group of 16 rows of W and some rows of x, the short ones written out: LLVM
    vectorises an inner loop only, and only if it need not ask which arrays overlap.
    """
    each = 8 if format_name == "q4_1" else 4
    tile_rows, columns = range(rows), range(each)
    weight = {
        "q4_1": "np.float32(np.int32((word >> np.uint32({0} * 4)) & np.uint32(15)))",
        "q8_0": "np.float32(np.int32(word << np.uint32(24 - {0} * 8)) >> np.int32(24))",
    }[format_name]
    loads = [f"x{j}_{i} = x[{j}, at + {i}]" for j in tile_rows for i in columns]
    products = [f"p{j} = part[r + {16 * j}]" for j in tile_rows]
    for i in columns:
        products.append(f"w = {weight.format(i)}")
        products += [f"p{j} += w * x{j}_{i}" for j in tile_rows]
    stored = [f"part[r + {16 * j}] = p{j}" for j in tile_rows]
    scaled = [f"t{j} = total[r + {16 * j}] + scale * part[r + {16 * j}]" for j in tile_rows]
    loaded_sums = []
    if format_name == "q4_1":
        loaded_sums = [f"s{j} = sums[{j}, b]" for j in tile_rows]
        scaled.append("minimum = half(factors >> np.uint32(16))")
        scaled += [f"t{j} += minimum * s{j}" for j in tile_rows]
    scaled += [f"total[r + {16 * j}] = t{j}" for j in tile_rows]

    def lines(statements: list[str], depth: int) -> str:
        return "\n".join("    " * depth + statement for statement in statements)

    return _TILE.format(
        size=16 * rows,
        chunks=BLOCK // each,
        each=each,
        loads=lines(loads, 3),
        products=lines(products, 4),
        sums=lines(stored, 4) + "\n" + lines(loaded_sums, 2),
        scaled=lines(scaled, 3),
        stores=lines([f"y[{j}, r] = total[r + {16 * j}]" for j in tile_rows], 2),
    )


def numba_kernels(threads: int) -> dict[str, Kernel]:
    """Kernels by format, compiled by Numba. ImportError where it is not installed."""
    import numba

    numba.set_num_threads(threads)
    # Contraction to fused multiply-adds is what g++ does by itself; sums stay in their order.
    compiled = numba.njit(fastmath={"contract"}, nogil=True, error_model="numpy")

    @compiled
    def half(bits: Any) -> Any:
        shifted = ((bits & np.uint32(0x7FFF)) << np.uint32(13)) | (
            (bits & np.uint32(0x8000)) << np.uint32(16)
        )
        return np.uint32(shifted).view(np.float32) * np.float32(2.0**112)

    def tile(format_name: str, rows: int) -> Any:
        scope: dict[str, Any] = {"np": np, "half": half}
        exec(_tile_source(format_name, rows), scope)
        return compiled(scope["tile"])

    def build(format_name: str) -> Kernel:
        tile8, tile4, tile1 = (tile(format_name, rows) for rows in TILES)

        def product(words: Any, x: Any, sums: Any, y: Any) -> None:
            rows = x.shape[0]
            for g in numba.prange(words.shape[0]):
                first, last = g * 16, g * 16 + 16
                j = 0
                while j + 8 <= rows:
                    tile8(words[g], x[j : j + 8], sums[j : j + 8], y[j : j + 8, first:last])
                    j += 8
                while j + 4 <= rows:
                    tile4(words[g], x[j : j + 4], sums[j : j + 4], y[j : j + 4, first:last])
                    j += 4
                while j < rows:
                    tile1(words[g], x[j : j + 1], sums[j : j + 1], y[j : j + 1, first:last])
                    j += 1

        parallel: Kernel = numba.njit(parallel=True, nogil=True, error_model="numpy")(product)
        return parallel

    return {"q4_1": build("q4_1"), "q8_0": build("q8_0")}
