"""LoRA adapters as PEFT writes them, of random weights; and checkpoints they are merged into."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Mapping[str, Sequence[int]],
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    **settings: Any,
) -> Path:
    """Write an adapter that is strong enough to change tokens."""
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(base.items()):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            stored = f"base_model.model.{module}.lora_"
            outputs, inputs = shape
            down = torch.randn(rank, inputs, generator=noise) * inputs**-0.5
            tensors[f"{stored}A.weight"] = down
            tensors[f"{stored}B.weight"] = torch.randn(outputs, rank, generator=noise) * 0.2
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "use_rslora": False,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    weights = load_file(checkpoint / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        up = factors[name.replace("lora_A", "lora_B")]
        delta = scale * (up.double() @ factors[name].double())
        weights[target] = (weights[target].double() + delta).float()
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors")
    return folder


def weight_shapes(checkpoint: Path) -> dict[str, Sequence[int]]:
    return {
        name: tuple(tensor.shape)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
