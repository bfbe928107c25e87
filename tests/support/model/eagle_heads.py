"""Random EAGLE heads in the layouts of published ones, and what their authors' code computes.

`Published` follows cnets1.py (EAGLE-1) and cnets.py (EAGLE-3) of github.com/SafeAILab/EAGLE for one
sequence, without a cache, and speculators' `norm_before_residual`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from worker.models.config import ModelConfig

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Layout:
    """One published layout. `drafted`: the size of the draft vocabulary; None: all tokens."""

    method: str
    config: dict[str, Any] = field(default_factory=dict)
    layer: str = "midlayer."
    hidden_size: int = 0  # 0: that of the target
    drafted: int | None = 40
    biases: bool = False
    has_own_words: bool = False
    is_nested: bool = False  # as speculators write it


LAYOUTS = {
    "eagle": Layout("eagle", layer="layers.0."),
    "eagle, biased": Layout("eagle", layer="layers.0.", biases=True, has_own_words=True),
    "eagle3": Layout("eagle3"),
    "eagle3, given outputs": Layout("eagle3", {"eagle_config": {_LAYER_IDS: [4, 0, 2]}}),
    "eagle3, speculators": Layout(
        "eagle3", {_LAYER_IDS: [1, 3, 6]}, layer="layers.0.", is_nested=True
    ),
    "eagle3, another size": Layout("eagle3", hidden_size=40, has_own_words=True),
    "eagle3, all tokens": Layout("eagle3", drafted=None),
}


def write_head(path: Path, layout: Layout, target: ModelConfig, seed: int = 4) -> Path:
    """Write a head for a target of 6 layers or more; norms are not all 1."""
    hidden, inner = layout.hidden_size or target.hidden_size, 44
    is_third, layer, heads, kv_heads, dim = layout.method == "eagle3", layout.layer, 4, 2, 8
    own = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        # Less than the target's, as in heads that were trained on short texts.
        "max_position_embeddings": 16,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": target.vocab_size,
    }
    config = {"transformer_layer_config": own} if layout.is_nested else own
    if is_third:
        config = {**config, "draft_vocab_size": layout.drafted}
    if layout.hidden_size:
        config = {**config, "target_hidden_size": target.hidden_size}
    read = 2 * hidden if is_third else hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * target.hidden_size if is_third else 2 * hidden),
        f"{layer}self_attn.q_proj.weight": (heads * dim, read),
        f"{layer}self_attn.k_proj.weight": (kv_heads * dim, read),
        f"{layer}self_attn.v_proj.weight": (kv_heads * dim, read),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        f"{layer}post_attention_layernorm.weight": (hidden,),
    }
    if is_third:
        norms = (f"{layer}hidden_norm.weight", f"{layer}input_layernorm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
        if layout.drafted is not None:
            shapes["lm_head.weight"] = (layout.drafted, hidden)
    if layout.biases:
        shapes["fc.bias"] = (hidden,)
        for name in ("q", "k", "v"):
            product = f"{layer}self_attn.{name}_proj"
            shapes[f"{product}.bias"] = shapes[f"{product}.weight"][:1]
    if layout.has_own_words:
        shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    noise = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=noise) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }
    if is_third and layout.drafted is not None:
        chosen = torch.randperm(target.vocab_size, generator=noise)[: layout.drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(layout.drafted)
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool)
        tensors["t2d"][chosen] = True
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | layout.config))
    save_file(tensors, path / "model.safetensors")
    return path


@dataclass(frozen=True)
class TargetWeights:
    """The target's matrices [V, H] and final norm [H]."""

    words: Tensor
    rows: Tensor
    norm: Tensor
    eps: float


class Published:
    """A head's own computation. `layers` are the indices of the states that it reads."""

    def __init__(self, path: Path, target: TargetWeights, num_layers: int) -> None:
        config = json.loads((path / "config.json").read_text())
        nested = config.get("transformer_layer_config")
        self.config: dict[str, Any] = config | (nested or {})
        self.target = target
        found = load_file(path / "model.safetensors")
        self.weights = {
            n.replace("midlayer.", "").replace("layers.0.", ""): found[n] for n in found
        }
        self.is_third = "norm.weight" in self.weights
        self.adds_normed = nested is not None
        outputs = config.get("eagle_config", {}).get(_LAYER_IDS)
        self.layers = config.get(_LAYER_IDS) or [2, num_layers // 2, num_layers - 3]
        if outputs:
            self.layers = [layer + 1 for layer in outputs]
        self.words = self.weights.get("embed_tokens.weight", target.words)
        self.rows = self.weights.get("lm_head.weight", target.rows)
        offsets = self.weights.get("d2t", torch.zeros(len(self.rows), dtype=torch.int64))
        self.tokens = torch.arange(len(self.rows)) + offsets

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """`states` enter each layer; the last one leaves the last layer."""
        if self.is_third:
            return self._linear(torch.cat([states[layer] for layer in self.layers], -1), "fc")
        return rms(states[-1], self.target.norm, self.target.eps)

    def states(self, features: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Row p has the feature of p and token p + 1."""
        words, eps = self.words[torch.tensor(token_ids)], self.config["rms_norm_eps"]
        if self.is_third:
            normed = rms(features, self.weights["hidden_norm.weight"], eps)
            words = rms(words, self.weights["input_layernorm.weight"], eps)
            x, read = normed if self.adds_normed else features, torch.cat((words, normed), -1)
        else:
            x = read = self._linear(torch.cat((words, features), -1), "fc")
        x = x + self._linear(self._attention(read), "self_attn.o_proj")
        normed = rms(x, self.weights["post_attention_layernorm.weight"], eps)
        gated = silu(self._linear(normed, "mlp.gate_proj")) * self._linear(normed, "mlp.up_proj")
        return x + self._linear(gated, "mlp.down_proj")

    def logits(self, states: Tensor) -> Tensor:
        if self.is_third:
            states = rms(states, self.weights["norm.weight"], self.config["rms_norm_eps"])
        return states @ self.rows.T

    def drafts(self, states: Sequence[Tensor], token_ids: Sequence[int], count: int) -> list[int]:
        """Return the greedy drafts that follow `token_ids`, of which the target has run all but the
        last: `states` as in `features`.
        """
        features, rows, found = self.features(states), list(token_ids[1:]), []
        for _ in range(count):
            last = self.states(features, rows)[-1:]
            found.append(int(self.tokens[self.logits(last).argmax()]))
            features, rows = torch.cat((features, last)), [*rows, found[-1]]
        return found

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _attention(self, read: Tensor) -> Tensor:
        dim, heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (
            self._linear(read, f"self_attn.{name}_proj").view(len(read), -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        q, k = (rotated(each, self.config["rope_theta"]) for each in (q, k))
        shared = heads // self.config["num_key_value_heads"]
        k, v = (each.repeat_interleave(shared, dim=0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(len(read), -1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotate x [heads, T, dim] by positions from 0 on."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(half) / half)
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
