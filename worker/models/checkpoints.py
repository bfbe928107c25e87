"""Named tensors on disk: GGUF files and Hugging Face safetensors directories.

Both are read through one interface under Hugging Face's tensor names, straight into the memory the
model keeps: a tensor is decoded a piece at a time, so that a start needs little more memory than
the model itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.errors import ModelError
from worker.models import config as model_config
from worker.models.config import ModelConfig
from worker.models.gguf import GgufFile
from worker.models.quants import read_part

# Elements decoded at a time: little enough to stay in a core's cache, and for torch to copy them in
# the thread that decoded them (it shares larger copies out, which costs more than it gains).
_PIECE_ELEMENTS = 32000

_SAFE_FLOATS = ("F64", "F32", "F16", "BF16")
# Architectures whose converter interleaves the rotary rows of q and k (llama.cpp's "normal" rope).
_INTERLEAVED = ("llama", "smollm3")

_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGML_OF = {hf: ggml for ggml, hf in (_GGUF_NAMES | _GGUF_LAYER_NAMES).items()}


class WeightFile(Protocol):
    """Named tensors on disk. `source` names it in errors."""

    source: str
    config: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor stored, by its Hugging Face name."""
        ...

    def stored_name(self, name: str) -> str:
        """What the checkpoint itself calls (or would call) a tensor."""
        ...

    def read_into(self, name: str, destination: Tensor) -> None:
        """Decode one tensor into contiguous memory of its shape, of any float dtype and device."""
        ...


def open_checkpoint(path: Path) -> WeightFile:
    """Open a GGUF file or a safetensors directory; raise `ModelError` saying what is wrong."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.exists():
        return GgufCheckpoint(path)
    raise ModelError(f"{path}: no such file or directory")


def read(checkpoint: WeightFile, name: str) -> Tensor:
    """A whole tensor as float32 on the CPU."""
    tensor = torch.empty(checkpoint.shapes()[name])
    checkpoint.read_into(name, tensor)
    return tensor


class GgufCheckpoint:
    """A GGUF file under Hugging Face names, with rotary rows in rotate-half order."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        self.source = str(path)
        self.config = model_config.from_gguf(self._file)
        self._stored = {_hf_name(name): name for name in self._file.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._stored.items()}

    def stored_name(self, name: str) -> str:
        return self._stored.get(name) or _ggml_name(name)

    def read(self, name: str) -> Tensor:
        """A whole tensor as float32 on the CPU."""
        return read(self, name)

    def read_into(self, name: str, destination: Tensor) -> None:
        parts = self._parts(name, destination)
        count = len(parts)
        step = max(1, _PIECE_ELEMENTS * count // max(1, destination.numel()))
        for start in range(0, count, step):
            piece = parts[start : start + step]
            values = read_part(self._file, self._stored[name], start, start + len(piece), count)
            piece.copy_(torch.from_numpy(values).view(piece.shape))

    def _parts(self, name: str, destination: Tensor) -> Tensor:
        """The destination as a row of parts in the order the file has them: rows, or, where rotary
        rows are interleaved, heads with their two halves taken in turns.
        """
        rows = self._rotary_heads(name)
        if rows is not None:
            return destination.view(rows, 2, -1, *destination.shape[1:]).transpose(1, 2)
        return destination if destination.dim() > 1 else destination.unsqueeze(0)

    def _rotary_heads(self, name: str) -> int | None:
        if self.config.architecture not in _INTERLEAVED:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name it does not know stays as it is."""
    layer = _GGUF_LAYER.fullmatch(name)
    if layer is not None and layer[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name


def _ggml_name(name: str) -> str:
    """The way back."""
    layer = _HF_LAYER.fullmatch(name)
    if layer is not None and layer[2] in _GGML_OF:
        return f"blk.{layer[1]}.{_GGML_OF[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_GGML_OF[stem]}.{suffix}" if stem in _GGML_OF else name


class SafetensorsCheckpoint:
    """A directory with `config.json` and `model.safetensors`, or shards and their index."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        config_path = path / "config.json"
        self.config = model_config.from_hf(str(config_path), _read_json(config_path))
        shards = [_open_shard(path / shard) for shard in _shard_names(path)]
        self._shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(shard.get_slice(name).get_shape()) for name, shard in self._shard_of.items()
        }

    def stored_name(self, name: str) -> str:
        return name

    def read_into(self, name: str, destination: Tensor) -> None:
        shard = self._shard_of[name]
        dtype = shard.get_slice(name).get_dtype()
        if dtype not in _SAFE_FLOATS:
            raise ModelError(
                f"{self.source}: tensor {name} is {dtype}; supported are {', '.join(_SAFE_FLOATS)}"
            )
        destination.copy_(shard.get_tensor(name))


def _shard_names(path: Path) -> list[str]:
    """The weight files of a directory, by its index where there is one."""
    index_path = path / "model.safetensors.index.json"
    if not index_path.exists():
        return ["model.safetensors"]
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index_path}: weight_map is missing or not an object")
    return sorted({str(Path(str(shard)).name) for shard in weight_map.values()})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
