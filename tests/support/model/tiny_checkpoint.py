"""Checkpoints of random weights, as published ones are laid out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.models.config import GEMMA, from_hf
from worker.models.draft_head import HeadShape
from worker.models.loader import expected_shapes, load_model
from worker.training.store import head_metadata

# Phi-3 stores products of one input as one.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def save_checkpoint(path: Path, config: dict[str, Any], scale: float = 0.3, seed: int = 8) -> None:
    """Weights are `scale` from zero, and norms as far from one."""
    (path / "config.json").write_text(json.dumps(config))
    shape = from_hf("config.json", config)
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in expected_shapes(shape).items():
        tensors[name] = torch.randn(size, generator=noise) * scale
        if "norm" in name and shape.architecture not in GEMMA:  # which add the one themselves
            tensors[name] += 1
    if config["model_type"] == "phi3":
        for index in range(shape.num_layers):
            prefix = f"model.layers.{index}."
            for fused, parts in FUSED.items():
                own = [tensors.pop(f"{prefix}{part}.weight") for part in parts]
                tensors[f"{prefix}{fused}.weight"] = torch.cat(own)
    save_file(tensors, path / "model.safetensors")


@torch.inference_mode()
def save_random_head(checkpoint: Path, path: Path) -> str:
    """Write a draft head of random weights for a checkpoint, and return its path."""
    target = load_model(checkpoint, torch.float32, torch.device("cpu"))
    size = target.config.vocab_size
    shape = HeadShape(intermediate_size=48, draft_vocab_size=size)
    noise = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=noise) * 0.3
        for name, size in shape.tensor_shapes(target.config).items()
    }
    tensors["draft_vocab"] = torch.arange(size)
    save_file(tensors, path, head_metadata(shape, target))
    return str(path)


def configure(path: Path, **changes: object) -> None:
    """Change keys of a checkpoint's `config.json`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def rewritten(
    checkpoint: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    """Write a checkpoint with other tensors to another folder."""
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return folder
