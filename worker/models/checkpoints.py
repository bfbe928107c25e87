"""Named tensors on disk: GGUF files and Hugging Face safetensors directories.

Both are read under Hugging Face's tensor names, directly into the model's memory, a piece at a
time. The `gguf` package decodes ggml's encodings to float32, exactly as llama.cpp does.
"""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import ConfigError, ModelError
from worker.models import config as model_config
from worker.models.config import GEMMA, ModelConfig
from worker.models.fields import read_json
from worker.models.gguf import GgufFile
from worker.models.names import (
    ROUTER,
    from_mixtral,
    ggml_name,
    hf_name,
    num_rows,
    places,
    row_order,
    to_mixtral,
)
from worker.models.quantized import QuantizedTensors, as_blocks, read_quantization
from worker.ops.cpu.native import GGML_TYPES, Stored, stored
from worker.ops.planes import BlockWeight
from worker.ops.quantized import GroupedWeight

# Elements decoded at a time: few enough to stay in a core's cache, and for torch to copy them in
# the thread that decoded them (it splits larger copies over threads, at a net loss).
_PIECE_ELEMENTS = 32000

Float32Array = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_SAFE_FLOATS = ("F64", "F32", "F16", "BF16")
_BLOCK_ELEMENTS = 32  # of Q8_0 and Q4_1
# Architectures whose converter interleaves the rotary rows of q and k (llama.cpp's "normal" rope).
_INTERLEAVED = ("llama", "smollm3")

_NORM = re.compile(r"norm\.weight$")
_PROJECTION_BIAS = re.compile(r"\.(?:([a-z_]+)_proj|w[123])\.bias$")


class WeightFile(Protocol):
    """Named tensors on disk; `source` names the file in errors. See `grouped` for the weights of a
    checkpoint that `is_grouped`, or `is_in_blocks` (GGUF).
    """

    source: str
    config: ModelConfig
    is_grouped: bool
    is_in_blocks: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by Hugging Face name."""

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's own name of a tensor, whether it is stored or not."""

    def read_into(
        self, name: str, destination: Tensor, first_row: int = 0, first_column: int = 0
    ) -> None:
        """Decode one tensor, or the part that begins at a row and a column (in a vector, at element
        `first_row`), into contiguous memory of the part's shape, of any float dtype and device. A
        part of a tensor with rotary rows consists of whole heads.
        """

    def stored(self, name: str) -> Stored | None:
        """Return a weight [rows, cols] as stored; None if its encoding has to be decoded."""

    def grouped(self, name: str, rows: slice, columns: slice) -> GroupedWeight | BlockWeight | None:
        """Return a part of a weight as codes with scales by group, or as blocks; None if it is not
        quantised. Both slices have a start and a stop.
        """


def open_checkpoint(path: Path, quantization: str = "none") -> WeightFile:
    """Open a GGUF file or a safetensors directory; raise `ModelError` that explains what is wrong.

    `stored` returns a directory's weights in `quantization` "q8_0" or "q4_1", for which a GGUF file
    raises `ConfigError`.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path, quantization)
    if path.exists():
        if quantization != "none":
            raise ConfigError(
                f"--quantization {quantization}: {path} is a GGUF file, which is quantised already;"
                " leave the flag out, or give a Hugging Face directory as --model"
            )
        return GgufCheckpoint(path)
    raise ModelError(f"{path}: no such file or directory")


def read(checkpoint: WeightFile, name: str) -> Tensor:
    """Read a whole tensor as float32 on the CPU."""
    tensor = torch.empty(checkpoint.shapes()[name])
    checkpoint.read_into(name, tensor)
    return tensor


class GgufCheckpoint:
    """A GGUF file under Hugging Face names, with rotary rows in rotate-half order."""

    is_grouped = False
    is_in_blocks = True

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        self.source = str(path)
        self.config = model_config.from_gguf(self._file)
        named = {hf_name(name, self.config): name for name in self._file.tensors}
        shapes = {name: info.shape for name, info in self._file.tensors.items()}
        self._stored = places(named, shapes, self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: place.shape(self._file.tensors[place.stored].shape)
            for name, place in self._stored.items()
        }

    def stored_name(self, name: str) -> str:
        if name in self._stored:
            return self._stored[name].stored
        return ggml_name(name, self.config)

    def read_into(
        self, name: str, destination: Tensor, first_row: int = 0, first_column: int = 0
    ) -> None:
        place, part = self._stored[name], slice(first_row, first_row + len(destination))
        info = self._file.tensors[place.stored]
        if len(info.shape) < 2:  # a vector is short, and its parts may cut blocks
            values = decoded(self._file, place.stored, self._file.tensor_bytes(place.stored))
            own = self._in_order(name, values[place.start : place.stop])[part]
            destination.copy_(torch.from_numpy(own))
            return
        rows, columns = self._in_order(name, self._rows(name))[part], info.shape[-1]
        own_columns = slice(first_column, first_column + destination.shape[-1])
        step = max(1, _PIECE_ELEMENTS // columns)
        for start in range(0, len(rows), step):
            values = decoded(self._file, place.stored, rows[start : start + step].reshape(-1))
            piece = torch.from_numpy(values).view(-1, columns)[:, own_columns]
            destination[start : start + step].copy_(piece)

    def stored(self, name: str) -> Stored | None:
        place = self._stored[name]
        order = row_order(name, self.config, place.stop - place.start)
        info = self._file.tensors[place.stored]
        if info.type.name not in GGML_TYPES or len(info.shape) < 2:
            return None
        data = self._rows(name)
        data = (data if order is None else data[order]).reshape(-1)
        rows, cols = place.stop - place.start, info.shape[-1]
        return Stored(info.type.name, rows, cols, data, self._rotary_heads(name) or 0)

    def _rows(self, name: str) -> _Bytes:
        """Return the encoded rows of a weight [rows, bytes], in the file's order."""
        place = self._stored[name]
        shape = self._file.tensors[place.stored].shape
        data = np.frombuffer(self._file.tensor_bytes(place.stored), np.uint8)
        return data.reshape(num_rows(shape), -1)[place.start : place.stop]

    def _in_order(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Put rows, encoded or not, from the file's order into the model's."""
        heads, order = self._rotary_heads(name), row_order(name, self.config, len(rows))
        if heads is not None:  # the rows of a head's halves alternate
            halves = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)
            rows = halves.reshape(rows.shape)
        return rows if order is None else rows[order]

    def grouped(self, name: str, rows: slice, columns: slice) -> BlockWeight | None:
        kind = self._file.tensors[self._stored[name].stored].type
        if kind.block_elements == 1:
            return None
        data = self._in_order(name, self._rows(name))[rows]
        first, stop = columns.start // kind.block_elements, -(-columns.stop // kind.block_elements)
        blocks = data.reshape(len(data), -1, kind.block_bytes)[:, first:stop]
        is_cut = (stop - first) * kind.block_elements > columns.stop - columns.start
        return BlockWeight(kind.name, blocks, is_cut)

    def _rotary_heads(self, name: str) -> int | None:
        if self.config.architecture not in _INTERLEAVED:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


class SafetensorsCheckpoint:
    """A directory with `config.json` and `model.safetensors`, or shards and their index. With a
    `quantization` other than "none", `stored` returns rows of whole blocks in that encoding.
    """

    is_in_blocks = False

    def __init__(self, path: Path, quantization: str = "none") -> None:
        self.source = str(path)
        self._quantization = quantization
        config_path = path / "config.json"
        values = read_json(config_path)
        self.config = model_config.from_hf(str(config_path), values)
        shards = [_open_shard(path / shard) for shard in _shard_names(path)]
        self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
        # Scalars become vectors of one element, so that every tensor has rows.
        self._shapes = {
            name: tuple(shard.get_slice(name).get_shape()) or (1,)
            for name, shard in self._shard_of.items()
        }
        self._quantized = self._find_quantized(str(config_path), values)
        self.is_grouped = self._quantized is not None
        named = {name: name for name in self._shapes}
        if self.config.architecture == "mixtral":
            named = {from_mixtral(name): name for name in named}
        self._places = places(named, self._shapes, self.config)

    def _find_quantized(self, config_path: str, values: dict[str, Any]) -> QuantizedTensors | None:
        how = read_quantization(config_path, values)
        if how is None:
            return None
        if self._quantization != "none" and how.method != "fp8":
            raise ConfigError(
                f"--quantization {self._quantization}: {self.source} is quantised already, by"
                f" {how.method}; leave the flag out"
            )
        views = {name: shard.get_slice(name) for name, shard in self._shard_of.items()}
        types = {name: view.get_dtype() for name, view in views.items()}
        found = QuantizedTensors(self.source, how, self._shapes, types, views.__getitem__)
        others = {n: shape for n, shape in self._shapes.items() if n not in found.others}
        self._shapes = others | found.weights
        if how.method == "gptq":
            for name in [n for n in others if self._is_needless(n)]:
                del self._shapes[name]
        return found

    def _is_needless(self, name: str) -> bool:
        """Return True for a bias of zeros where the model has no bias: AutoGPTQ writes them."""
        config, layer = self.config, _PROJECTION_BIAS.search(name)
        if layer is None:
            return False
        biased = {**dict.fromkeys(("q", "k", "v", "qkv"), config.qkv_bias), "o": config.output_bias}
        has_bias = biased.get(layer[1], config.mlp_bias)
        return not has_bias and not self._shard_of[name].get_tensor(name).any()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: p.shape(self._shapes[p.stored]) for name, p in self._places.items()}

    def stored_name(self, name: str) -> str:
        if name in self._places:
            return self._places[name].stored
        return to_mixtral(name) if self.config.architecture == "mixtral" else name

    def read_into(
        self, name: str, destination: Tensor, first_row: int = 0, first_column: int = 0
    ) -> None:
        columns = slice(first_column, first_column + destination.shape[-1])
        part = slice(first_row, first_row + len(destination))
        grouped = self.grouped(name, part, columns)
        if grouped is not None:
            grouped.decode_into(destination)
            return
        first = self._places[name].start + first_row
        rows = slice(first, first + len(destination))
        tensor = self._tensor(name, rows, columns if destination.dim() > 1 else None)
        # Gemma's norms multiply by 1 + weight; GGUF files store the sum, these the weight.
        is_added = self.config.architecture in GEMMA and _NORM.search(name)
        destination.copy_(tensor.float() + 1 if is_added else tensor)

    def stored(self, name: str) -> Stored | None:
        place = self._places[name]
        rows, columns = place.shape(self._shapes[place.stored])
        grouped = self.grouped(name, slice(0, rows), slice(0, columns))
        if grouped is None:
            tensor = self._tensor(name, slice(place.start, place.stop))
        else:
            blocks = as_blocks(grouped) if self._quantization == "none" else None
            if blocks is not None:
                return blocks
            tensor = grouped.decode()
            # FP8 with scales that are powers of two is exact in bfloat16, at half the memory.
            narrow = tensor.bfloat16()
            tensor = narrow if torch.equal(narrow.float(), tensor) else tensor
        # A quantised router would change which experts a token takes.
        is_exact = self._quantization == "none" or f".{ROUTER}." in name
        if not is_exact and tensor.shape[1] % _BLOCK_ELEMENTS == 0:
            return quantized(tensor, self._quantization.upper())
        return None if tensor.dtype is torch.float64 else stored(tensor)

    def grouped(self, name: str, rows: slice, columns: slice) -> GroupedWeight | None:
        place = self._places[name]
        if self._quantized is None or place.stored not in self._quantized.weights:
            return None
        own = slice(place.start + rows.start, place.start + rows.stop)
        weight = self._quantized.read(place.stored, own, columns)
        order = row_order(name, self.config, len(weight.codes))
        return weight if order is None else weight.take(order)

    def _tensor(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """Return rows of a stored tensor. Raise `ModelError` for an unsupported dtype."""
        stored = self._places[name].stored
        view = self._shard_of[stored].get_slice(stored)
        dtype, shape = view.get_dtype(), self._shapes[stored]
        if dtype not in _SAFE_FLOATS:
            raise ModelError(
                f"{self.source}: tensor {stored} is {dtype};"
                f" supported are {', '.join(_SAFE_FLOATS)}"
            )
        is_whole = rows == slice(0, shape[0]) and columns in (None, slice(0, shape[-1]))
        if is_whole:
            tensor: Tensor = self._shard_of[stored].get_tensor(stored).reshape(shape)
        else:
            tensor = view[rows] if columns is None else view[rows, columns]
        order = row_order(name, self.config, len(tensor))
        return tensor if order is None else tensor[order]


def _shard_names(path: Path) -> list[str]:
    index_path, single = path / "model.safetensors.index.json", "model.safetensors"
    if (path / single).exists():
        return [single]
    if not index_path.exists():
        return sorted(shard.name for shard in path.glob("model-*-of-*.safetensors")) or [single]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index_path}: weight_map is missing or not an object")
    # Only the name: an index must not point outside its directory.
    return sorted({str(Path(str(shard)).name) for shard in weight_map.values()})


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def decoded(file: GgufFile, name: str, data: memoryview | _Bytes) -> Float32Array:
    """Decode whole rows of a tensor to a fresh array [elements]. Raises `ModelError` for an
    encoding that the `gguf` package does not decode.
    """
    info, raw = file.tensors[name], np.frombuffer(data, np.uint8)
    decode = _DECODERS.get(info.type.name)
    if decode is not None:
        return decode(raw)
    row = info.shape[-1] // info.type.block_elements * info.type.block_bytes
    # The package decodes 16 rows at a time; fewer and longer rows take it fewer turns.
    row *= next(n for n in (64, 16, 4, 1) if len(raw) // row % n == 0)
    try:
        gguf = import_module("gguf")
        kind = getattr(gguf.GGMLQuantizationType, info.type.name)
        values = gguf.quants.dequantize(raw.reshape(-1, row), kind)
    except (NotImplementedError, AttributeError, ImportError) as error:
        raise ModelError(f"{file.path}: tensor {name}: cannot decode {info.type.name}") from error
    return np.ascontiguousarray(values, np.float32).reshape(-1)


# Of plain numbers, which need no package.
_DECODERS: dict[str, Callable[[_Bytes], Float32Array]] = {
    # astype copies: callers may write to the result, but not to the mapping.
    "F32": lambda raw: raw.view("<f4").astype(np.float32),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
}


def quantized(weight: Tensor, type_name: str) -> Stored:
    """Encode a dense weight [rows, cols] in blocks of Q8_0 or Q4_1. `cols` are whole blocks."""
    gguf = import_module("gguf")
    kind = gguf.GGMLQuantizationType[type_name]
    rows, cols = weight.shape
    data = np.empty(gguf.quants.quant_shape_to_byte_shape((rows, cols), kind), np.uint8)
    step = max(1, _PIECE_ELEMENTS // cols)
    for start in range(0, rows, step):
        piece = weight[start : start + step].float().numpy()
        # A value that is not finite makes its block's scale not finite, whatever the codes are.
        with np.errstate(all="ignore"):
            data[start : start + step] = gguf.quants.quantize(piece, kind)
    return Stored(type_name, rows, cols, data.reshape(-1))
