"""Reader of the GGUF container: metadata and tensor directory of a memory-mapped file.

It imports neither torch nor numpy, so that the tokenizer can read a vocabulary without them. Layout
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian throughout:

    "GGUF"  u32 version  u64 n_tensors  u64 n_kv
    n_kv      × (string key, u32 type, value)
    n_tensors × (string name, u32 n_dims, u64 dims[n_dims] fastest first, u32 type, u64 offset)
    padding to `general.alignment`, then the data section the offsets count from

A file is input from outside: every count, length and offset is checked against the size of the file
before it is used, and any mismatch is a `ModelError` that names the file and the place.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from worker.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)  # version 1 has counts and lengths of 32 bits
DEFAULT_ALIGNMENT = 32

_MAX_DIMS = 8
_MAX_ARRAY_DEPTH = 4  # hostile nesting must not exhaust the stack
_TYPE_BOOL, _TYPE_STRING, _TYPE_ARRAY = 7, 8, 9
_SCALAR_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MIN_KV_BYTES = 8 + 4 + 1  # an empty key, a type, one byte of value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dims, a type, an offset


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor encoding: `block_bytes` bytes hold `block_elements` consecutive values of a row."""

    name: str
    block_elements: int
    block_bytes: int


GGML_TYPES = {
    number: GgmlType(*facts)
    for number, facts in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
        26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor. `shape` has the slowest dimension first, as in torch and numpy; the
    range of `offset` and `num_bytes` is absolute and inside the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file. The mapping lives as long as this object or any view of its tensors.

    `metadata` maps every key to a plain value: int, float, bool, str, or a list of them.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _data: mmap.mmap = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map and read a file's directory; raise `ModelError` naming the file and the reason."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:  # mmap refuses an empty file
            raise ModelError(f"{path}: not a GGUF file: it is empty") from error
        cursor = _Cursor(path, data)
        num_tensors, num_kv = _read_header(cursor)
        metadata = _read_metadata(cursor, num_kv)
        tensors = _read_tensor_infos(cursor, num_tensors, metadata)
        return cls(path, metadata, tensors, data)

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: general.architecture is missing or not a string")
        return value

    def tensor_bytes(self, name: str) -> memoryview:
        """Return a read-only view of a tensor's encoded bytes; raise `ModelError` if unknown."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return memoryview(self._data)[info.offset : info.offset + info.num_bytes]


class _Cursor:
    """Sole owner of the read position; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0
        self.place = "the header"

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: corrupt GGUF in {self.place}: {reason}")

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        end = start + num_bytes
        if end > self.size:
            self.fail(f"{num_bytes} bytes wanted at {start}, the file ends at {self.size}")
        self.position = end
        return self.data[start:end]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, min_bytes_each: int, what: str) -> int:
        """Read a u64 count of items, bounded by the rest of the file."""
        count = self.u64()
        if count * min_bytes_each > self.size - self.position:
            self.fail(f"{count} {what} cannot fit in a file of {self.size} bytes")
        return count

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"a string is not UTF-8: {error.reason}")

    def strings(self, count: int) -> list[str]:
        """Read `count` strings. This loop dominates a start: merges alone may be 100,000."""
        data, size, position = self.data, self.size, self.position
        from_bytes = int.from_bytes
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + from_bytes(data[position:start], "little")
                if position > size:
                    self.fail(f"string {len(out)} of {count} runs past the end of the file")
                append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            self.fail(f"string {len(out)} of {count} is not UTF-8: {error.reason}")
        self.position = position
        return out


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file: it starts with {cursor.data[:4]!r}")
    cursor.take(4)
    version = cursor.u32()
    if version not in SUPPORTED_VERSIONS:
        # A big-endian file looks like an absurd version; name the real reason.
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = (
            "it is big-endian" if swapped in SUPPORTED_VERSIONS else f"its version is {version}"
        )
        raise ModelError(f"{cursor.path}: unsupported GGUF file: {reason}")
    num_tensors = cursor.count(_MIN_TENSOR_BYTES, "tensors")
    num_kv = cursor.count(_MIN_KV_BYTES, "metadata keys")
    return num_tensors, num_kv


def _read_metadata(cursor: _Cursor, num_kv: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_kv):
        cursor.place = f"metadata key {index}"
        key = cursor.string()
        if key in metadata:
            cursor.fail(f"key {key!r} appears twice")
        cursor.place = f"metadata key {key!r}"
        metadata[key] = _read_value(cursor, cursor.u32(), depth=0)
    return metadata


def _read_value(cursor: _Cursor, value_type: int, depth: int) -> Any:
    if value_type == _TYPE_STRING:
        return cursor.string()
    if value_type == _TYPE_ARRAY:
        return _read_array(cursor, depth + 1)
    code = _SCALAR_FORMATS.get(value_type)
    if code is None:
        cursor.fail(f"unknown value type {value_type}")
    return struct.unpack(f"<{code}", cursor.take(struct.calcsize(f"<{code}")))[0]


def _read_array(cursor: _Cursor, depth: int) -> list[Any]:
    if depth > _MAX_ARRAY_DEPTH:
        cursor.fail(f"arrays are nested deeper than {_MAX_ARRAY_DEPTH}")
    element_type = cursor.u32()
    if element_type == _TYPE_STRING:
        return cursor.strings(cursor.count(8, "strings"))
    if element_type == _TYPE_ARRAY:
        return [_read_array(cursor, depth + 1) for _ in range(cursor.count(12, "arrays"))]
    code = _SCALAR_FORMATS.get(element_type)
    if code is None:
        cursor.fail(f"unknown array element type {element_type}")
    count = cursor.count(struct.calcsize(f"<{code}"), "array elements")
    layout = struct.Struct(f"<{count}{code}")
    return list(layout.unpack(cursor.take(layout.size)))


def _read_tensor_infos(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]
) -> dict[str, TensorInfo]:
    cursor.place = "metadata key 'general.alignment'"
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        cursor.fail(f"the alignment is {alignment!r}")
    relative: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        cursor.place = f"tensor {index}"
        info = _read_tensor_info(cursor, alignment)
        if info.name in relative:
            cursor.fail(f"tensor {info.name!r} appears twice")
        relative[info.name] = info
    # Offsets count from the first aligned position after the directory.
    data_start = -(-cursor.position // alignment) * alignment
    return {name: _placed(cursor, info, data_start) for name, info in relative.items()}


def _read_tensor_info(cursor: _Cursor, alignment: int) -> TensorInfo:
    """Read one directory entry; its offset still counts from the data section."""
    name = cursor.string()
    cursor.place = f"tensor {name!r}"
    num_dims = cursor.u32()
    if num_dims > _MAX_DIMS:
        cursor.fail(f"{num_dims} dimensions")
    # GGUF writes the fastest dimension first.
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    type_id = cursor.u32()
    ggml_type = GGML_TYPES.get(type_id)
    if ggml_type is None:
        cursor.fail(f"unknown tensor type {type_id}")
    offset = cursor.u64()
    if offset % alignment:
        cursor.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
    # Blocks never span rows.
    row = shape[-1] if shape else 1
    if row % ggml_type.block_elements:
        cursor.fail(f"rows of {row} are not whole blocks of {ggml_type.name}")
    num_bytes = math.prod(shape) // ggml_type.block_elements * ggml_type.block_bytes
    return TensorInfo(name, shape, ggml_type, offset, num_bytes)


def _placed(cursor: _Cursor, info: TensorInfo, data_start: int) -> TensorInfo:
    offset = data_start + info.offset
    if offset + info.num_bytes > cursor.size:
        cursor.place = f"tensor {info.name!r}"
        end = offset + info.num_bytes
        cursor.fail(f"its data ends at {end}, the file at {cursor.size} (a partial download?)")
    return TensorInfo(info.name, info.shape, info.type, offset, info.num_bytes)
