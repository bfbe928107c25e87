"""What a checkpoint says about its architecture, read from GGUF metadata or Hugging Face JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from worker.errors import ModelError
from worker.models.gguf import GgufFile

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2")

_T = TypeVar("_T", int, float)
_MISSING = object()


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is "linear" or "llama3".

    Only `factor` applies to linear. The others are Llama 3.1's: frequencies whose wavelength is
    beyond `original_context / low_frequency_factor` are divided by `factor`, those below
    `original_context / high_frequency_factor` are kept, and between the two it is interpolated.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a llama-family decoder.

    `max_context` is the number of positions it may attend to: the trained context, or the sliding
    window where that is shorter (inside the window, full attention is the same thing).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers)
        if min(*sizes, self.num_heads, self.num_kv_heads, self.head_dim, self.max_context) < 1:
            raise ModelError(f"model configuration has a size below 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token keeps over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


class _Fields:
    """Typed look-ups in one source of configuration; a missing or wrong value names its key."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def number(self, key: str, kind: type[_T], default: Any = _MISSING) -> _T:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ModelError(f"{self.source}: {key} is missing")
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {key} is {value!r}, not a number")
        if kind is int and value != int(value):
            raise ModelError(f"{self.source}: {key} is {value!r}, not a whole number")
        return kind(value)

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key) or False)


def _check_architecture(source: str, architecture: object) -> str:
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(
            f"{source}: architecture {architecture!r} is not supported (supported: {supported})"
        )
    return architecture


def from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata; raise `ModelError` naming a missing key."""
    source = str(file.path)
    architecture = _check_architecture(source, file.architecture)
    prefix = f"{architecture}."
    keys = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    fields = _Fields(f"{source}: {architecture}", keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source}: tensor token_embd.weight is missing")
    hidden = fields.number("embedding_length", int)
    heads = fields.number("attention.head_count", int)
    head_dim = fields.number("attention.key_length", int, hidden // max(heads, 1))
    if fields.number("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"{source}: partial rotary embedding is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=fields.number("feed_forward_length", int),
        num_layers=fields.number("block_count", int),
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_context=fields.number("context_length", int),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", float),
        rope_theta=fields.number("rope.freq_base", float, 10000.0),
        rope_scaling=_gguf_scaling(fields),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def _gguf_scaling(fields: _Fields) -> RopeScaling | None:
    """Linear scaling, or None. Llama 3's is not in the keys but a tensor, `rope_freqs.weight`."""
    kind = fields.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"{fields.source}: rope scaling {kind!r} is not supported")
    return RopeScaling("linear", fields.number("rope.scaling.factor", float))


def from_hf(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a Hugging Face `config.json`; `source` names the file in errors."""
    architecture = _check_architecture(source, values.get("model_type"))
    if values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source}: hidden_act {values['hidden_act']!r} is not supported")
    fields = _Fields(source, values)
    heads = fields.number("num_attention_heads", int)
    hidden = fields.number("hidden_size", int)
    max_context = fields.number("max_position_embeddings", int)
    # Qwen2 writes a window it does not use beside `use_sliding_window: false`.
    if values.get("sliding_window") is not None and values.get("use_sliding_window", True):
        max_context = min(max_context, fields.number("sliding_window", int))
    rope = _hf_rope(values)
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size", int),
        num_layers=fields.number("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", int, heads),
        head_dim=fields.number("head_dim", int, hidden // max(heads, 1)),
        max_context=max_context,
        rms_norm_eps=fields.number("rms_norm_eps", float, 1e-6),
        rope_theta=_Fields(source, rope).number("rope_theta", float, 10000.0),
        rope_scaling=_hf_scaling(_Fields(source, rope)),
        tied_head=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _hf_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of either layout: `rope_parameters` (transformers 5), or `rope_theta`
    beside `rope_scaling` (before).
    """
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if "rope_theta" not in rope and values.get("rope_theta") is not None:
        rope["rope_theta"] = values["rope_theta"]
    return rope


def _hf_scaling(rope: _Fields) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor", float))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor", float),
            rope.number("low_freq_factor", float),
            rope.number("high_freq_factor", float),
            rope.number("original_max_position_embeddings", int),
        )
    raise ModelError(f"{rope.source}: rope scaling {kind!r} is not supported")
