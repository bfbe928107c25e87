"""Checkpoints of both formats give the logits of transformers, or are refused by name."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.errors import ModelError
from worker.executor.input_batch import CacheLayout, InputBatch
from worker.executor.kv_cache import allocate
from worker.models.loader import load_model
from worker.types import ScheduledSequence

CPU = torch.device("cpu")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied head": ("Llama", {"tie_word_embeddings": False}),
    "tied head": ("Llama", {"tie_word_embeddings": True}),
    "one KV head a head": ("Llama", {"num_key_value_heads": 4}),
    "explicit head_dim": ("Llama", {"head_dim": 24}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama3 rope scaling": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
}


def logits_of(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [T, vocab] of every position, from one prefill."""
    with torch.inference_mode():
        model = load_model(path, dtype, CPU)
        cache = allocate(20, 16, model.config, dtype, CPU)
        sequence = ScheduledSequence(0, token_ids, 0, range(20))
        step = InputBatch(
            [sequence], CacheLayout(16, model.config.num_kv_heads), dtype, CPU
        ).tensors
        step = dataclasses.replace(step, sample_rows=torch.arange(len(token_ids)))
        return model.forward(step, cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_safetensors_give_the_logits_of_transformers(
    variant: str, save_tiny: Callable[..., Any]
) -> None:
    """Every supported shape of checkpoint agrees at every position of a prompt."""
    kind, changes = VARIANTS[variant]
    saved = save_tiny(kind, **changes)
    logits = logits_of(saved.path, saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_float32(save_tiny: Callable[..., Any]) -> None:
    """The lower precision changes logits by little more than its rounding."""
    saved = save_tiny()
    logits = logits_of(saved.path, saved.token_ids, torch.bfloat16)
    assert float((logits - saved.logits).abs().mean() / saved.logits.std()) < 0.03


def test_shards_are_one_checkpoint(save_tiny: Callable[..., Any]) -> None:
    """Weights spread over files by an index load as if they were in one."""
    saved = save_tiny(shard_size="60KB")
    assert len(list(saved.path.glob("*.safetensors"))) > 1
    logits = logits_of(saved.path, saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_logits_of_transformers(
    tied: bool, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Interleaved rotary rows are put back, and the head is found or tied."""
    saved = save_tiny(tie_word_embeddings=tied)
    logits = logits_of(write_gguf(saved.model), saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


def test_gguf_rope_factors_are_applied(
    save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Factors stored as a tensor divide the frequencies, as linear scaling by the same number."""
    linear = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    saved = save_tiny(rope_parameters=linear)
    path = write_gguf(saved.model, **{"rope_freqs.weight": np.full(8, 3.0, np.float32)})
    logits = logits_of(path, saved.token_ids)
    torch.testing.assert_close(logits, saved.logits, rtol=1e-4, atol=1e-4)


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a saved checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight"),
        (
            lambda t: t.update({"model.layers.7.extra": torch.ones(1)}),
            r"unexpected tensors: model\.layers\.7\.extra",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            r"model\.norm\.weight has shape \[63\], not \[64\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is I8",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
    save_tiny: Callable[..., Any],
) -> None:
    """Missing, surplus, misshapen and integer tensors are refused with their names."""
    saved = save_tiny()
    edit(saved.path, change)
    with pytest.raises(ModelError, match=reason):
        load_model(saved.path, torch.float32, CPU)


def test_derived_buffers_are_ignored(save_tiny: Callable[..., Any]) -> None:
    """Rotary frequencies that old exporters stored are no reason to refuse."""
    saved = save_tiny()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(saved.path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert load_model(saved.path, torch.float32, CPU).config.num_layers == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big', not a number"),
        ({"num_hidden_layers": 1.5}, "not a whole number"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 15}, "is odd"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    ],
)
def test_a_configuration_that_cannot_work_is_named(
    change: dict[str, object], reason: str, save_tiny: Callable[..., Any]
) -> None:
    """What the code does not do is refused, with the key and its value."""
    saved = save_tiny()
    config_path = saved.path / "config.json"
    config_path.write_text(json.dumps({**json.loads(config_path.read_text()), **change}))
    with pytest.raises(ModelError, match=reason):
        load_model(saved.path, torch.float32, CPU)


def test_unreadable_files_are_named(save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """A path that is not there, broken JSON, and a damaged weight file each name their file."""
    with pytest.raises(ModelError, match="nowhere: no such file"):
        load_model(tmp_path / "nowhere", torch.float32, CPU)
    saved = save_tiny()
    (saved.path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_model(saved.path, torch.float32, CPU)
    (saved.path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(saved.path, torch.float32, CPU)


def test_a_sliding_window_caps_the_context(save_tiny: Callable[..., Any]) -> None:
    """Full attention is only right inside the window, so no more than that is offered."""
    saved = save_tiny("Mistral", sliding_window=128)
    assert load_model(saved.path, torch.float32, CPU).config.max_context == 128


@pytest.mark.model
def test_the_default_model_is_what_its_metadata_says(model_path: Path) -> None:
    """SmolLM2-135M: 30 layers, 9 heads on 3 KV heads, tied head, rotary base 100,000."""
    config = load_model(model_path, torch.bfloat16, CPU).config
    shape = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads)
    assert shape == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_context, config.tied_head) == (49152, 8192, True)
    assert config.rope_theta == 100_000
