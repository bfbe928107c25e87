"""The real model in our executor, and in transformers to compare with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.model.whole_engine import torch_config
from worker.config import SchedulerConfig
from worker.executor.interface import Executor
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor
from worker.models.checkpoints import GgufCheckpoint, read

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
        save_checkpoint(path, TINY | changes, seed=seed)
        return path

    return make


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
    weights = {name: read(checkpoint, name) for name in checkpoint.shapes()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
