"""The real model in our executor, and in transformers to compare with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.model.whole_engine import torch_config
from worker.config import SchedulerConfig
from worker.executor.interface import Executor
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor
from worker.models.loader import GgufCheckpoint

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(seed: int, **changes: int) -> Path:
        path = tmp_path_factory.mktemp("tiny")
        config = TINY | changes
        (path / "config.json").write_text(json.dumps(config))
        save_file(_weights(config, torch.Generator().manual_seed(seed)), path / "model.safetensors")
        return path

    return make


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": weight(*shape)
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    return tensors


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(seed=1)


@pytest.fixture
def tiny_executor(tiny_checkpoint: Path) -> ModelRunner:
    return build_executor(torch_config(tiny_checkpoint))[0]


@pytest.fixture(scope="module")
def float32_executor(model_path: Path) -> Executor:
    return _executor(model_path, "float32")


@pytest.fixture(scope="module")
def auto_executor(model_path: Path) -> Executor:
    return _executor(model_path, "auto")


def _executor(path: Path, dtype: str) -> Executor:
    limits = SchedulerConfig(max_model_len=2048)
    config = torch_config(path, dtype=dtype, num_blocks_override=1000, scheduler=limits)
    return build_executor(config)[0]


@pytest.fixture(scope="module")
def transformers_model(model_path: Path) -> Any:
    """The oracle has the same dequantised weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = GgufCheckpoint(model_path)
    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_head,
    )
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = LlamaForCausalLM(config)
    weights = {name: checkpoint.read(name) for name in checkpoint.shapes()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
