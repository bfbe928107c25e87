"""Rotary frequencies and tables of a model, scaled as its configuration says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.rope_config import RopeScaling
from worker.ops.rope import RopeTable, make_rope_table


def model_rope_table(
    config: ModelConfig, length: int, device: torch.device, factors: Tensor | None = None
) -> RopeTable:
    """cos and sin of positions 0 to length-1, on a device."""
    frequencies = inverse_frequencies(config, factors).to(device)
    table = make_rope_table(frequencies, length)
    scaling = config.rope_scaling
    if scaling is None or scaling.attention_factor == 1.0:
        return table
    return RopeTable(table.cos * scaling.attention_factor, table.sin * scaling.attention_factor)


def inverse_frequencies(config: ModelConfig, factors: Tensor | None = None) -> Tensor:
    """Rotary inverse frequencies [head_dim / 2], float32, scaled as the configuration says.

    `factors` [head_dim / 2] divide them (how GGUF stores Llama 3's scaling).

    Dynamic scaling uses one base for all positions, that of a sequence as long as the model's
    context. transformers raises the base only once a sequence outgrows the original context, which
    no sequence does here, because the context of such a model is the original one.
    """
    scaling, head_dim = config.rope_scaling, config.head_dim
    base = config.rope_theta
    if scaling is not None and scaling.kind == "dynamic":
        base = _dynamic_base(base, head_dim, scaling, config.max_context)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (base**exponents)
    if factors is not None:
        frequencies = frequencies / factors
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn_frequencies(frequencies, base, scaling)
    return _llama3_frequencies(frequencies, scaling)


def _dynamic_base(base: float, head_dim: int, scaling: RopeScaling, context: int) -> float:
    stretch = max(context, scaling.original_context) / scaling.original_context
    grown = scaling.factor * stretch - (scaling.factor - 1)
    return float(base * grown ** (head_dim / (head_dim - 2))) if head_dim > 2 else base


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's stretch: long wavelengths by `factor`, short ones not, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn_frequencies(frequencies: Tensor, base: float, scaling: RopeScaling) -> Tensor:
    """YaRN's stretch: pairs that turn often over the original context keep their frequency, those
    that turn seldom are divided by `factor`, a ramp over the index of the pair between.
    """
    pairs = len(frequencies)

    def pair_turning(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
