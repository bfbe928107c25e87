"""A checkpoint of random weights in the shape of a published model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from worker.models.config import from_hf
from worker.models.loader import expected_shapes

QWEN3_600M: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Path:
    """Write a Hugging Face directory, always with the same weights; return it. Its tokenizer knows
    no word: prompts are token ids.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    draw = torch.Generator().manual_seed(20260101)
    tensors = {
        name: (0.05 * torch.randn(shape, generator=draw) + ("norm" in name)).to(dtype)
        for name, shape in expected_shapes(from_hf("config.json", dict(config))).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "pad_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
