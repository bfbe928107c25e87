"""The real model in our executor, and in transformers to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.config import EngineConfig, SchedulerConfig
from worker.executor.interface import Executor
from worker.executor.model_runner import build_executor
from worker.models.loader import GgufCheckpoint


@pytest.fixture(scope="module")
def float32_executor(model_path: Path) -> Executor:
    """The real model, exact."""
    return _executor(model_path, "float32")


@pytest.fixture(scope="module")
def auto_executor(model_path: Path) -> Executor:
    """The real model in the dtype a worker chooses by itself."""
    return _executor(model_path, "auto")


def _executor(path: Path, dtype: str) -> Executor:
    limits = SchedulerConfig(max_model_len=2048)
    return build_executor(
        EngineConfig("torch", str(path), dtype, num_blocks_override=1000, scheduler=limits)
    )[0]


@pytest.fixture(scope="module")
def transformers_model(model_path: Path) -> Any:
    """LlamaForCausalLM on the same dequantised weights, in float32."""
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
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
