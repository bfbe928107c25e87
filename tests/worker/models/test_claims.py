"""Configurations that claim more than their files hold are refused at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.errors import ModelError
from worker.models.loader import load_model

CPU = torch.device("cpu")


@pytest.mark.timeout(60)  # naming the tensors of so many layers takes hours
@pytest.mark.parametrize("kind", ["Llama", "SmolLM3"])
def test_more_layers_than_tensors_are_refused(
    kind: str, save_tiny: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """A number of layers no file can have costs nothing to refuse, in both formats."""
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


def test_the_rotary_table_is_as_long_as_sequences_get(save_tiny: Callable[..., Any]) -> None:
    """What a configuration claims to reach takes no memory unless it is used."""
    path = save_tiny().path
    for asked, length in ((None, 256), (100, 100), (1000, 256)):
        assert load_model(path, torch.float32, CPU, asked).rope.cos.shape[0] == length
