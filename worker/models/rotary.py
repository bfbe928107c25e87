"""Settings of the rotary embedding, read from GGUF metadata or Hugging Face JSON.

Sources: transformers' `modeling_rope_utils.py` for Hugging Face's keys, llama.cpp for GGUF's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import ModelError
from worker.models.fields import Fields

_LONGROPE = ("longrope", "su")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of rotary frequencies of a model that was trained for `original_context` tokens.

    By `kind`, linear: frequencies are divided by `factor`. dynamic: a larger base for contexts
    beyond the original one (NTK). llama3: frequencies of wavelengths above `original_context /
    low_frequency_factor` are divided by `factor`, those below `original_context /
    high_frequency_factor` stay, those between are interpolated. yarn (Peng et al.,
    arXiv:2309.00071): they are interpolated between `beta_fast` and `beta_slow` turns over the
    original context, with bounds rounded outwards if `truncate`; cos and sin are multiplied by
    `attention_factor`, as in longrope (Ding et al., arXiv:2402.13753), where each frequency is
    divided by its own of `long_factors` for a context longer than the original one, else of
    `short_factors`.
    """

    kind: str
    factor: float
    original_context: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.original_context < 1 or self.attention_factor <= 0:
            raise ModelError(f"rope scaling has a size that is not positive: {self}")
        if self.beta_fast <= 0 or self.beta_slow <= 0:
            raise ModelError(f"rope scaling turns a number of times that is not positive: {self}")
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            raise ModelError(f"rope scaling has its frequency factors the wrong way round: {self}")


def hf_rope(source: str, values: Mapping[str, Any]) -> Fields:
    """Read `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    stated = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ModelError(f"{source}: rope_parameters or rope_scaling is {stated!r}, not an object")
    rope = dict(stated)
    if isinstance(rope.get("full_attention"), Mapping):  # settings by type of layer
        rope = dict(rope["full_attention"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in rope and values.get(key) is not None:
            rope[key] = values[key]
    return Fields(source, rope)


def hf_scaling(source: str, values: Mapping[str, Any]) -> RopeScaling | None:
    rope = hf_rope(source, values)
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    positions = Fields(source, values).number("max_position_embeddings", int)
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind, rope.number("factor", float), positions)
    if kind == "llama3":
        return RopeScaling(
            kind,
            rope.number("factor", float),
            rope.number("original_max_position_embeddings", int),
            low_frequency_factor=rope.number("low_freq_factor", float),
            high_frequency_factor=rope.number("high_freq_factor", float),
        )
    if kind == "yarn":
        return _hf_yarn(rope, positions)
    if kind in _LONGROPE and values.get("model_type") == "phi3":
        return _hf_longrope(rope, values, positions)
    raise rope.refuse(f"rope scaling {kind!r} is not supported")


def _hf_yarn(rope: Fields, positions: int) -> RopeScaling:
    original = rope.number("original_max_position_embeddings", int, positions)
    factor = rope.number("factor", float, positions / max(original, 1))
    attention = rope.optional("attention_factor")
    if attention is None:
        mscale, over_all = rope.optional("mscale"), rope.optional("mscale_all_dim")
        if mscale and over_all:
            attention = _mscale(factor, mscale) / (_mscale(factor, over_all) or 1.0)
        else:
            attention = _mscale(factor)
    return RopeScaling(
        "yarn",
        factor,
        original,
        # As in transformers, 0 counts as missing.
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        truncate=rope.flag("truncate", default=True),
        attention_factor=attention,
    )


def _hf_longrope(rope: Fields, values: Mapping[str, Any], positions: int) -> RopeScaling:
    """Read longrope. Phi-3 states the original context beside the rotary settings, not in them."""
    stated = Fields(rope.source, {**values, **rope.values})
    original = stated.number("original_max_position_embeddings", int, positions)
    factor = rope.number("factor", float, positions / max(original, 1))
    attention = rope.optional("attention_factor")
    if attention is None:
        # A hostile file may state 1, whose logarithm is 0.
        grown = math.log(factor) / math.log(max(original, 2)) if factor > 1 else 0.0
        attention = math.sqrt(1 + grown)
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=attention,
        short_factors=rope.factors("short_factor"),
        long_factors=rope.factors("long_factor"),
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cos and sin, which lets attention logits grow with the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def gguf_scaling(fields: Fields) -> RopeScaling | None:
    """Read the scaling in a file's keys, or None. Llama 3's is a tensor, `rope_freqs.weight`."""
    kind = fields.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    positions = fields.number("context_length", int)
    if kind == "linear":
        return RopeScaling(kind, fields.number("rope.scaling.factor", float), positions)
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor", float)
        if fields.number("rope.scaling.yarn_ext_factor", float, 1.0) != 1.0:
            raise fields.refuse("rope.scaling.yarn_ext_factor other than 1 is not supported")
        attention = fields.number("rope.scaling.attn_factor", float, 1.0)
        attention *= fields.number("rope.scaling.yarn_attn_factor", float, 1.0)
        return RopeScaling(
            kind,
            factor,
            fields.number("rope.scaling.original_context_length", int, positions),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", float, 1.0),
            # llama.cpp multiplies the file's factor by YaRN's own.
            attention_factor=attention * _mscale(factor),
        )
    raise fields.refuse(f"rope scaling {kind!r} is not supported")
