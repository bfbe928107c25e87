"""Checkpoint to model: GGUF files and Hugging Face safetensors directories.

Both are read through one interface under Hugging Face's tensor names. A tensor that is missing, has
another shape than the configuration says, or belongs to nothing is a `ModelError` that names it.
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
from worker.models.layers import LayerWeights, inverse_frequencies
from worker.models.llama import LlamaModel
from worker.models.quants import read_tensor
from worker.ops.linear import Linear, make_linear
from worker.ops.rope import make_rope_table

# Buffers some exporters store although they follow from the configuration.
_DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
_ROPE_FACTORS = "rope_freqs.weight"

_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Checkpoint(Protocol):
    """Named tensors on disk. `source` names it in errors."""

    source: str
    config: ModelConfig

    def names(self) -> set[str]:
        """Hugging Face names of every tensor stored."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in whatever float dtype it decodes to."""
        ...


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """Load a GGUF file or a safetensors directory; raise `ModelError` saying what is wrong."""
    path = Path(path)
    checkpoint: Checkpoint
    if path.is_dir():
        checkpoint = SafetensorsCheckpoint(path)
    elif path.exists():
        checkpoint = GgufCheckpoint(path)
    else:
        raise ModelError(f"{path}: no such file or directory")
    return _Assembly(checkpoint, dtype, device).model()


class GgufCheckpoint:
    """A GGUF file under Hugging Face names, with rotary rows in rotate-half order."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        self.source = str(path)
        self.config = model_config.from_gguf(self._file)
        self._stored = {_hf_name(name): name for name in self._file.tensors}

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str) -> Tensor:
        tensor = torch.from_numpy(read_tensor(self._file, self._stored[name]))
        if self.config.architecture == "llama":
            if ".q_proj." in name:
                return _unpermute(tensor, self.config.num_heads)
            if ".k_proj." in name:
                return _unpermute(tensor, self.config.num_kv_heads)
        return tensor


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name it does not know stays as it is."""
    layer = _GGUF_LAYER.fullmatch(name)
    if layer is not None and layer[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_GGUF_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name


def _unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows (or bias) of interleaved rotary pairs back to two halves, head by head."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


class SafetensorsCheckpoint:
    """A directory with `config.json` and `model.safetensors`, or shards and their index."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        config_path = path / "config.json"
        self.config = model_config.from_hf(str(config_path), _read_json(config_path))
        self._shards = {shard: _open_shard(path / shard) for shard in _shard_names(path)}
        self._shard_of = {name: shard for shard in self._shards.values() for name in shard.keys()}  # noqa: SIM118

    def names(self) -> set[str]:
        return set(self._shard_of)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._shard_of[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{self.source}: tensor {name} is {tensor.dtype}, not a float type")
        return tensor


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
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


class _Assembly:
    """Takes every tensor of a checkpoint exactly once and builds the model from them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._dtype = dtype
        self._device = device
        self._left = {name for name in checkpoint.names() if not _DERIVED.search(name)}

    def model(self) -> LlamaModel:
        config = self._config
        embedding = self._take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        final_norm = self._take("model.norm.weight", config.hidden_size)
        head = self._head(embedding)
        factors = None
        if _ROPE_FACTORS in self._left:
            factors = self._read(_ROPE_FACTORS, (config.head_dim // 2,)).float()
        if self._left:
            raise ModelError(f"{self._checkpoint.source}: unexpected tensors: {_some(self._left)}")
        frequencies = inverse_frequencies(config, factors).to(self._device)
        rope = make_rope_table(frequencies, config.max_context)
        return LlamaModel(config, embedding, layers, final_norm, head, rope)

    def _head(self, embedding: Tensor) -> Linear:
        if not self._config.tied_head:
            name = "lm_head.weight"
            return make_linear(self._take(name, self._config.vocab_size, self._config.hidden_size))
        self._left.discard("lm_head.weight")  # some exporters store the tied copy as well
        return make_linear(embedding)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def fused(sizes: dict[str, int], inputs: int, bias: bool) -> Linear:
            weights = [self._take(f"{prefix}{n}.weight", s, inputs) for n, s in sizes.items()]
            biases = [self._take(f"{prefix}{n}.bias", s) for n, s in sizes.items() if bias]
            return make_linear(_cat(weights), _cat(biases) if bias else None)

        qkv = {
            "self_attn.q_proj": query_size,
            "self_attn.k_proj": kv_size,
            "self_attn.v_proj": kv_size,
        }
        return LayerWeights(
            input_norm=self._take(f"{prefix}input_layernorm.weight", hidden),
            qkv=fused(qkv, hidden, config.qkv_bias),
            output=fused({"self_attn.o_proj": hidden}, query_size, config.output_bias),
            mlp_norm=self._take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=fused({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=fused({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        """A tensor that must exist with this shape, in the model's dtype on its device."""
        return self._read(name, shape).to(device=self._device, dtype=self._dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        source = self._checkpoint.source
        if name not in self._left:
            raise ModelError(f"{source}: tensor {name} is missing")
        self._left.discard(name)
        tensor = self._checkpoint.read(name)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise ModelError(f"{source}: tensor {name} has shape {found}, not {list(shape)}")
        return tensor


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _some(names: set[str], limit: int = 5) -> str:
    """A few names, and how many more there are."""
    listed = ", ".join(sorted(names)[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
