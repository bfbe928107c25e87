"""The architecture of a checkpoint, read from GGUF metadata or Hugging Face JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import ModelError
from worker.models.fields import Fields
from worker.models.gguf import GgufFile
from worker.models.rope_config import (
    RopeScaling,
    gguf_context_length,
    gguf_fields,
    gguf_scaling,
    hf_context_length,
    hf_rope,
    hf_scaling,
)

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

# SmolLM3 leaves rotary embedding out of every fourth layer unless the file says otherwise.
_SMOLLM3_NO_ROPE_INTERVAL = 4
_QWEN3_HEAD_DIM = 128  # where a Qwen3 configuration does not say
# Keys of GGUF that change the arithmetic, and the value that leaves it as it is.
_NEUTRAL_KEYS = {
    "expert_count": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attention.temperature_scale": 0,
    "logit_scale": 1,
    "embedding_scale": 1,
    "residual_scale": 1,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a llama-family decoder.

    `max_context` is the number of positions it may attend to: the trained context, or the sliding
    window where that is shorter (inside the window, full attention is the same thing).

    `qk_norm`: queries and keys are normalised per head before they are rotated. `no_rope_layers`
    are the layers that do not rotate at all.
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
    qk_norm: bool = False
    no_rope_layers: range | frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers)
        if min(*sizes, self.num_heads, self.num_kv_heads, self.head_dim, self.max_context) < 1:
            raise ModelError(f"model configuration has a size below 1: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.rope_theta <= 1 or self.rms_norm_eps < 0:
            raise ModelError(
                f"rope_theta {self.rope_theta} must be above 1, and rms_norm_eps"
                f" {self.rms_norm_eps} at least 0"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token keeps over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def check_architecture(source: str, architecture: object) -> str:
    """The architecture, when it is one that this engine computes. Raises `ModelError`."""
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(
            f"{source}: architecture {architecture!r} is not supported (supported: {supported})"
        )
    return architecture


def from_gguf(file: GgufFile) -> ModelConfig:
    """The configuration in a GGUF file's metadata; raise `ModelError` naming a missing key."""
    source = str(file.path)
    architecture = check_architecture(source, file.architecture)
    fields = gguf_fields(source, architecture, file.metadata)
    for key, neutral in _NEUTRAL_KEYS.items():
        if fields.number(key, float, float(neutral)) != neutral:
            raise fields.refuse(f"{key} is {fields.values[key]!r}, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError(f"{source}: tensor token_embd.weight is missing")
    hidden = fields.number("embedding_length", int)
    heads = fields.number("attention.head_count", int)
    head_dim = fields.number("attention.key_length", int, hidden // max(heads, 1))
    if fields.number("attention.value_length", int, head_dim) != head_dim:
        raise fields.refuse("values of another size than keys are not supported")
    if fields.number("rope.dimension_count", int, head_dim) != head_dim:
        raise fields.refuse("partial rotary embedding is not supported")
    num_layers = fields.number("block_count", int)
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=fields.number("feed_forward_length", int),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_context=gguf_context_length(source, architecture, file.metadata),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", float),
        rope_theta=fields.number("rope.freq_base", float, 10000.0),
        rope_scaling=gguf_scaling(fields),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        no_rope_layers=_every_nth(_default_interval(architecture), num_layers),
    )


def _default_interval(architecture: str) -> int:
    return _SMOLLM3_NO_ROPE_INTERVAL if architecture == "smollm3" else 0


def _every_nth(interval: int, num_layers: int) -> range:
    """Layers interval-1, 2·interval-1, …; none for 0. Not written out: it is not checked yet that
    there are so many.
    """
    return range(interval - 1, num_layers, interval) if interval > 0 else range(0)


def from_hf(source: str, values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a Hugging Face `config.json`; `source` names the file in errors."""
    architecture = check_architecture(source, values.get("model_type"))
    if values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{source}: hidden_act {values['hidden_act']!r} is not supported")
    if values.get("quantization_config"):
        raise ModelError(
            f"{source}: quantization_config is not supported; use the unquantised weights or a"
            " GGUF file"
        )
    fields = Fields(source, values)
    heads = fields.number("num_attention_heads", int)
    hidden = fields.number("hidden_size", int)
    num_layers = fields.number("num_hidden_layers", int)
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size", int),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", int, heads),
        head_dim=fields.number("head_dim", int, _default_head_dim(architecture, hidden, heads)),
        max_context=hf_context_length(source, values),
        rms_norm_eps=fields.number("rms_norm_eps", float, 1e-6),
        rope_theta=hf_rope(source, values).number("rope_theta", float, 10000.0),
        rope_scaling=hf_scaling(source, values),
        tied_head=fields.flag("tie_word_embeddings", default=architecture == "smollm3"),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=architecture == "qwen3",
        no_rope_layers=_hf_no_rope_layers(fields, architecture, num_layers),
    )


def _default_head_dim(architecture: str, hidden: int, heads: int) -> int:
    return _QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // max(heads, 1)


def _hf_no_rope_layers(
    fields: Fields, architecture: str, num_layers: int
) -> range | frozenset[int]:
    """SmolLM3's `no_rope_layers` (1 where a layer rotates, 0 where not), or else its interval."""
    if architecture != "smollm3":
        return frozenset()
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        interval = fields.number("no_rope_layer_interval", int, _SMOLLM3_NO_ROPE_INTERVAL)
        return _every_nth(interval, num_layers)
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise fields.refuse(f"no_rope_layers is not a list of {num_layers} switches")
    return frozenset(n for n, rotates in enumerate(listed) if not rotates)
