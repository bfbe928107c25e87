"""Decodes ggml tensor encodings to float32 arrays, exactly as llama.cpp does.

The common encodings are written here, vectorised, because decoding is most of a start. The rest go
through the `gguf` package, which is imported only when a file needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.errors import ModelError
from worker.models.gguf import GgufFile, TensorInfo

Float32Array = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]


def read_tensor(file: GgufFile, name: str) -> Float32Array:
    """A tensor of the file as a fresh, writable float32 array of its shape.

    Raises `ModelError` when the tensor is missing or its encoding cannot be decoded.
    """
    file.tensor_bytes(name)  # an unknown name fails here
    return read_part(file, name, 0, 1, 1).reshape(file.tensors[name].shape)


def read_part(file: GgufFile, name: str, start: int, stop: int, parts: int) -> Float32Array:
    """Parts `start` to `stop`-1 of a tensor that falls into `parts` equal ones of whole blocks, as
    a fresh, writable, flat float32 array.

    Raises `ModelError` when the encoding cannot be decoded.
    """
    info = file.tensors[name]
    size = info.num_bytes // parts
    raw = np.frombuffer(file.tensor_bytes(name), np.uint8)[start * size : stop * size]
    decode = _DECODERS.get(info.type.name)
    if decode is not None:
        return decode(raw).reshape(-1)
    try:
        decoded = _decode_with_gguf(raw.reshape(-1, _row_bytes(len(raw), info)), info.type.name)
    except (NotImplementedError, AttributeError, ImportError) as error:
        raise ModelError(f"{file.path}: tensor {name}: cannot decode {info.type.name}") from error
    return np.ascontiguousarray(decoded, np.float32).reshape(-1)


def _row_bytes(num_bytes: int, info: TensorInfo) -> int:
    """Bytes to decode as one row: the package goes 16 rows at a time, and pays for each turn."""
    row = info.shape[-1] // info.type.block_elements * info.type.block_bytes
    rows = num_bytes // row
    return row * next(n for n in (64, 16, 4, 1) if rows % n == 0)


def _decode_with_gguf(rows: _Bytes, type_name: str) -> Any:
    gguf = import_module("gguf")
    return gguf.quants.dequantize(rows, getattr(gguf.GGMLQuantizationType, type_name))


def _half(columns: _Bytes) -> Float32Array:
    """Little-endian float16 pairs of bytes as float32, one column a pair."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _f32(raw: _Bytes) -> Float32Array:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: _Bytes) -> Float32Array:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: _Bytes) -> Float32Array:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: _Bytes) -> Float32Array:
    """16 bytes to 32 values: the low halves first, then the high halves."""
    values = np.empty((len(packed), 32), np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _q4_0(raw: _Bytes) -> Float32Array:
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _half(blocks[:, :2])
    return values


def _q4_1(raw: _Bytes) -> Float32Array:
    blocks = raw.reshape(-1, 20)
    scale_and_min = _half(blocks[:, :4])
    values = _nibbles(blocks[:, 4:])
    values *= scale_and_min[:, :1]
    values += scale_and_min[:, 1:]
    return values


def _q8_0(raw: _Bytes) -> Float32Array:
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks[:, :2])
    return values


def _q4_k(raw: _Bytes) -> Float32Array:
    """Super-blocks of 256: eight groups of 32, each with a 6-bit scale and a 6-bit minimum."""
    blocks = raw.reshape(-1, 144)
    scales, minimums = _six_bit_pairs(blocks[:, 4:16])
    scales *= _half(blocks[:, :2])
    minimums *= _half(blocks[:, 2:4])
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    values = np.empty((len(blocks), 4, 2, 32), np.float32)
    values[:, :, 0] = packed & 15
    values[:, :, 1] = packed >> 4
    grouped = values.reshape(-1, 8, 32)
    grouped *= scales[:, :, None]
    grouped -= minimums[:, :, None]
    return grouped


def _six_bit_pairs(packed: _Bytes) -> tuple[Float32Array, Float32Array]:
    """12 bytes to eight scales and eight minimums: the low four of each lie whole, the high four
    are split, their upper bits in what the low ones leave free.
    """
    low, high, split = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (split & 15) | ((low >> 6) << 4)), axis=-1)
    minimums = np.concatenate((high & 63, (split >> 4) | ((high >> 6) << 4)), axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q6_k(raw: _Bytes) -> Float32Array:
    """Super-blocks of 256: two halves of four rows of 32 values of 6 bits, an 8-bit scale for every
    16.
    """
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    values = np.empty((len(blocks), 2, 4, 32), np.float32)
    for row in range(4):
        nibbles = low[:, :, row & 1] & 15 if row < 2 else low[:, :, row & 1] >> 4
        values[:, :, row] = nibbles | (((high >> (2 * row)) & 3) << 4)
    values -= 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks[:, 208:])
    grouped = values.reshape(-1, 16, 16)
    grouped *= scales[:, :, None]
    return grouped


_DECODERS: dict[str, Callable[[_Bytes], Float32Array]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
