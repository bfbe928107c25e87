"""Tiny random llamas on disk, beside the transformers models they were saved from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint and the logits [T, vocab] the original gives for `token_ids`."""

    path: Path
    model: Any
    token_ids: list[int]
    logits: torch.Tensor


@pytest.fixture
def save_tiny(tmp_path: Path) -> Callable[..., Saved]:
    """Save a random model of a transformers class with changes to its configuration."""

    def save(kind: str = "Llama", shard_size: str = "5GB", **changes: object) -> Saved:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
        torch.manual_seed(5)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Far from the initial norms of one and biases of zero, so that swaps show.
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            token_ids = torch.randint(0, 97, (150,)).tolist()
            logits = model(torch.tensor([token_ids])).logits[0].float()
        path = tmp_path / "checkpoint"
        model.save_pretrained(path, max_shard_size=shard_size)
        return Saved(path, model, token_ids, logits)

    return save


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a transformers Llama as llama.cpp's converter does, rotary rows interleaved."""

    def write(model: Any, **extra: np.ndarray) -> Path:
        path = tmp_path / "tiny.gguf"
        config = model.config
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, parameter in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = parameter.numpy()
            if ".q_proj." in name:
                values = interleave(values, config.num_attention_heads)
            if ".k_proj." in name:
                values = interleave(values, config.num_key_value_heads)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), values.copy())
        for name, values in extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (first half, second half) of each head to alternating ones."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
