"""Tiny random models on disk, with the transformers models they were saved from."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.support.model.model_variants import SAVED

# llama.cpp's architecture for each model type, and whether its converter interleaves rotary rows.
GGUF_ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, False),
    "gemma3_text": (gguf.MODEL_ARCH.GEMMA3, False),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, False),
    "phi3": (gguf.MODEL_ARCH.PHI3, False),
}


@dataclass(frozen=True)
class Saved:
    """`logits` [T, vocab] are the original model's for `token_ids`."""

    path: Path
    model: Any
    token_ids: list[int]
    logits: torch.Tensor


@pytest.fixture
def save_tiny(tmp_path: Path) -> Callable[..., Saved]:
    def save(kind: str = "Llama", shard_size: str = "5GB", **changes: object) -> Saved:
        import transformers

        # transformers changes its argument.
        settings = copy.deepcopy({**SAVED, **changes})
        architecture = getattr(transformers, f"{kind}ForCausalLM")
        torch.manual_seed(5)
        model = architecture(architecture.config_class(**settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms are not all 1 and biases not all 0, so that a swap changes the logits.
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            token_ids = torch.randint(0, 97, (150,)).tolist()
            logits = model(torch.tensor([token_ids])).logits[0].float()
        path = tmp_path / "checkpoint"
        model.save_pretrained(path, max_shard_size=shard_size)
        return Saved(path, model, token_ids, logits)

    return save


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if "partial_rotary_factor" in rope:
        size = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    def write(model: Any, encodings: dict[str, Any] | None = None, **extra: np.ndarray) -> Path:
        path = tmp_path / "tiny.gguf"
        config = model.config
        architecture, interleaves = GGUF_ARCHITECTURES[config.model_type]
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
        describe(writer, config)
        names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        for name, parameter in separated(model.state_dict()):
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = parameter.numpy()
            if interleaves and ".q_proj." in name:
                values = interleave(values, config.num_attention_heads)
            if interleaves and ".k_proj." in name:
                values = interleave(values, config.num_key_value_heads)
            if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1
            stored = names.get_name(name, (".weight", ".bias"))
            kind = (encodings or {}).get(stored)
            if kind is None:
                writer.add_tensor(stored, values.copy())
            else:
                writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        for name, values in extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def separated(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield f"{stem}.experts.gate_proj.weight", gate.contiguous()
            yield f"{stem}.experts.up_proj.weight", up.contiguous()
        else:
            yield (f"{name}.weight" if last == "down_proj" else name), tensor


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
