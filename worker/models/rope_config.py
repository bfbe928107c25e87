"""The rotary embedding of a checkpoint, and the context length that follows from it.

Sources: transformers' `modeling_rope_utils.py` for what the keys mean, vLLM for how far a scaled
model reaches (`linear`: the stated positions times the factor; `yarn`: the original positions times
the factor), llama.cpp for the keys of GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import ModelError
from worker.models.fields import Fields


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` is "linear", "dynamic", "llama3" or "yarn".

    `original_context` is the number of positions the unscaled model was trained for.

    linear: frequencies divided by `factor` (kaiokendev). dynamic: a larger base for contexts beyond
    the original one (NTK). llama3: frequencies whose wavelength is beyond `original_context /
    low_frequency_factor` are divided by `factor`, those below `original_context /
    high_frequency_factor` are kept, and between the two it is interpolated. yarn (Peng et al.,
    arXiv:2309.00071): interpolated between `beta_fast` and `beta_slow` turns over the original
    context, the bounds rounded outwards when `truncate`; cos and sin times `attention_factor`.
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

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.original_context < 1 or self.attention_factor <= 0:
            raise ModelError(f"rope scaling has a size that is not positive: {self}")
        if self.beta_fast <= 0 or self.beta_slow <= 0:
            raise ModelError(f"rope scaling turns a number of times that is not positive: {self}")
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            raise ModelError(f"rope scaling has its frequency factors the wrong way round: {self}")


def hf_rope(source: str, values: Mapping[str, Any]) -> Fields:
    """The rotary settings of either layout: `rope_parameters` (transformers 5), or `rope_theta`
    beside `rope_scaling` (before). Raises `ModelError` when they are no object.
    """
    stated = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ModelError(f"{source}: rope_parameters or rope_scaling is {stated!r}, not an object")
    rope = dict(stated)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in rope and values.get(key) is not None:
            rope[key] = values[key]
    return Fields(source, rope)


def hf_scaling(source: str, values: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling in a `config.json`, or None; raise `ModelError` naming an unsupported kind."""
    rope = hf_rope(source, values)
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if rope.number("partial_rotary_factor", float, 1.0) != 1.0:
        raise rope.refuse("partial rotary embedding is not supported")
    if kind == "default":
        return None
    positions = Fields(source, values).number("max_position_embeddings", int)
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor", float), positions)
    if kind == "dynamic":
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
        beta_fast=rope.optional("beta_fast") or 32.0,
        beta_slow=rope.optional("beta_slow") or 1.0,
        truncate=rope.flag("truncate", default=True),
        attention_factor=attention,
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's growth of the attention logits with the context, of cos and sin each."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def gguf_scaling(fields: Fields) -> RopeScaling | None:
    """The scaling in a file's keys, or None. Llama 3's is a tensor instead, `rope_freqs.weight`."""
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
            attention_factor=attention * _mscale(factor),
        )
    raise fields.refuse(f"rope scaling {kind!r} is not supported")


def hf_context_length(source: str, values: Mapping[str, Any]) -> int:
    """Positions a model with this `config.json` may attend to: as far as its scaling reaches, or
    the sliding window where that is shorter (inside it, full attention is the same thing).
    """
    fields, rope = Fields(source, values), hf_rope(source, values)
    positions = fields.number("max_position_embeddings", int)
    kind = rope.values.get("rope_type") or rope.values.get("type")
    factor = rope.number("factor", float, 1.0)
    original = rope.number("original_max_position_embeddings", int, positions)
    # Qwen2 writes a window it does not use beside `use_sliding_window: false`.
    slides = fields.flag("use_sliding_window", default=True)
    window = fields.optional("sliding_window") if slides else None
    return _reach(_scaled(kind, positions, original, factor), window)


def gguf_context_length(source: str, architecture: str, metadata: Mapping[str, Any]) -> int:
    """The same for a GGUF file's metadata."""
    fields = gguf_fields(source, architecture, metadata)
    positions = fields.number("context_length", int)
    kind = fields.values.get("rope.scaling.type")
    factor = fields.number("rope.scaling.factor", float, 1.0)
    original = fields.number("rope.scaling.original_context_length", int, positions)
    window = fields.optional("attention.sliding_window")
    return _reach(_scaled(kind, positions, original, factor), window)


def gguf_fields(source: str, architecture: str, metadata: Mapping[str, Any]) -> Fields:
    """The architecture's own keys of a file, without their prefix."""
    prefix = f"{architecture}."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    return Fields(f"{source}: {architecture}", keys)


def _scaled(kind: object, positions: int, original: int, factor: float) -> int:
    if kind == "linear":
        return int(positions * max(factor, 1.0))
    return max(positions, int(original * factor)) if kind == "yarn" else positions


def _reach(positions: int, window: float | None) -> int:
    return min(positions, int(window)) if window else positions
