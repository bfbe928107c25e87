"""Oversized numbers in configurations are refused quickly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.errors import ModelError
from worker.models.config import from_hf
from worker.models.loader import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["Llama", "SmolLM3"])
def test_more_layers_than_tensors_are_refused(
    kind: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Building the names of their tensors would take hours."""
    changes = {"pad_token_id": 0, "no_rope_layers": None} if kind == "SmolLM3" else {}
    saved = save_tiny(kind, **changes)
    config_path = saved.path / "config.json"
    values = json.loads(config_path.read_text()) | {"num_hidden_layers": 10**9, **changes}
    config_path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="too few for 1000000000 layers"):
        load_model(saved.path, torch.float32, CPU)
    path = write_gguf(saved.model)
    key = f"{saved.model.config.model_type}.block_count".encode()
    stored = key + (4).to_bytes(4, "little")
    content = path.read_bytes()
    assert stored + (2).to_bytes(4, "little") in content
    path.write_bytes(
        content.replace(stored + (2).to_bytes(4, "little"), stored + (10**9).to_bytes(4, "little"))
    )
    with pytest.raises(ModelError, match="too few for 1000000000 layers"):
        load_model(path, torch.float32, CPU)


def test_the_maximum_length_bounds_the_rotary_table(save_tiny: Callable[..., Any]) -> None:
    """A claimed context takes no memory unless sequences can use it."""
    path = save_tiny().path
    for asked, length in ((None, 256), (100, 100), (1000, 256)):
        assert load_model(path, torch.float32, CPU, asked).rope.cos.shape[0] == length


SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], not an object"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', not an object"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "not positive"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "not positive",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "not positive"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "factor is too large"),
        ({"vocab_size": 10**400}, "vocab_size is too large"),
        ({"rope_theta": 0}, "rope_theta 0.0 must be above 1"),
        ({"rope_theta": -1}, "rope_theta -1.0 must be above 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1.0"),
    ],
)
def test_values_outside_the_arithmetic_are_refused(change: dict[str, Any], reason: str) -> None:
    """They would divide by zero or give NaN."""
    with pytest.raises(ModelError, match=reason):
        from_hf("config.json", {**SHAPE, **change})


def test_a_configuration_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(tmp_path, torch.float32, CPU)
