"""Names of tensors in files, and the places of the model's tensors in them.

The model's own names are those of a Llama in Hugging Face's layout, with `mlp.experts.N` for the
MLPs of a mixture.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from worker.models.config import ModelConfig

ROUTER = "mlp.gate"  # of a layer with experts; never quantised
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
# Names that differ in some architectures.
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTURE_NAMES = {
    "ffn_gate_inp": ROUTER,
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GGUF_OWN_NAMES = {
    "llama": _MIXTURE_NAMES,
    "qwen3moe": _MIXTURE_NAMES,
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Tensors that hold several of the model's tensors, stacked.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGML_OF = {hf: ggml for ggml, hf in (_GGUF_NAMES | _GGUF_LAYER_NAMES).items()}


@dataclass(frozen=True, slots=True)
class Place:
    stored: str
    start: int
    stop: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        # A stack of experts has three dimensions, each of its matrices two.
        return (self.stop - self.start, *whole[1:][-1:]) if whole else ()


def num_rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else sum(shape)


def places(
    stored: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, Place]:
    """Find the model's tensors in a file of these `shapes`; `stored` maps names to the file's.

    The last part of a fused tensor takes all remaining rows; a later check of shapes finds a wrong
    number.
    """
    places = {}
    sizes = {
        "self_attn.q_proj": config.num_heads * config.head_dim,
        "self_attn.k_proj": config.num_kv_heads * config.head_dim,
        "mlp.gate_proj": config.intermediate_size,
    }
    for name, own in stored.items():
        rows = num_rows(shapes[own])
        layer = _HF_LAYER.fullmatch(name)
        if layer is not None and "*" in layer[2]:  # a matrix for each expert
            size = rows // max(config.num_experts, 1)
            for n in range(config.num_experts):
                # GGUF stacks the matrices of all experts in one tensor.
                places[name.replace("*", str(n))] = Place(own, n * size, n * size + size)
            continue
        if layer is None or layer[2] not in _FUSED:
            places[name] = Place(own, 0, rows)
            continue
        start = 0
        for part in _FUSED[layer[2]]:
            stop = min(rows, start + sizes.get(part, rows))
            places[f"model.layers.{layer[1]}.{part}.{layer[3]}"] = Place(own, start, stop)
            start = stop
    return places


def row_order(name: str, config: ModelConfig, rows: int) -> list[int] | None:
    """Return the order for `rows` rows (of whole heads) of a query or key projection; None:
    unchanged. The kernels rotate a number with the one half a head away. Where only the first
    numbers of a head are rotated, these therefore move to the beginnings of both halves.
    """
    if config.rotary_dim in (0, config.head_dim) or not re.search(
        r"\.[qk]_proj\.(weight|bias)$", name
    ):
        return None
    pairs, half = config.rotary_dim // 2, config.head_dim // 2
    still = range(2 * pairs, config.head_dim)
    middle = half - pairs
    own = [*range(pairs), *still[:middle], *range(pairs, 2 * pairs), *still[middle:]]
    return [first + row for first in range(0, rows, config.head_dim) for row in own]


def hf_name(name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name; an unknown name stays unchanged."""
    layer = _GGUF_LAYER.fullmatch(name)
    known = _GGUF_LAYER_NAMES | _GGUF_OWN_NAMES.get(config.architecture, {})
    if layer is not None and layer[2] in known:
        return f"model.layers.{layer[1]}.{known[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_GGUF_NAMES[stem]}.{suffix}" if stem in _GGUF_NAMES else name


def ggml_name(name: str, config: ModelConfig) -> str:
    own = _GGUF_OWN_NAMES.get(config.architecture, {})
    known = _GGML_OF | {hf: ggml for ggml, hf in own.items()}
    layer = _HF_LAYER.fullmatch(re.sub(r"\.experts\.\d+\.", ".experts.*.", name))
    if layer is not None and layer[2] in known:
        return f"blk.{layer[1]}.{known[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{known[stem]}.{suffix}" if stem in known else name


def from_mixtral(name: str) -> str:
    return ".".join(_MIXTRAL.get(part, part) for part in name.split("."))


def to_mixtral(name: str) -> str:
    back = {own: stored for stored, own in _MIXTRAL.items()}
    return ".".join(back.get(part, part) for part in name.split("."))
