"""Layers that are not a Llama's give the same logits on the Triton backend as on torch's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model.model_variants import GEMMA2, GEMMA3, QWEN3_MOE, TINY
from tests.support.model.tiny_checkpoint import save_checkpoint
from worker.executor.kv_cache import allocate
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.loader import load_model
from worker.ops.triton.backend import TritonBackend
from worker.types import ScheduledSequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {**GEMMA2, "model_type": "gemma2", "num_hidden_layers": 2},
    "qwen3 moe": {**QWEN3_MOE, "model_type": "qwen3_moe"},
    "gemma3": {**GEMMA3, "model_type": "gemma3_text", "num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, torch.float32, 1e-4) for name in MODELS),
        ("qwen3 moe", torch.float16, 0.03),  # whose experts are dense, and run as grouped products
    ],
)
def test_logits_are_those_of_torch(
    name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    if dtype is torch.float16 and DEVICE.type == "cuda":
        pytest.skip("a GPU rounds otherwise, and a router may choose other experts")
    save_checkpoint(tmp_path, {**TINY, **MODELS[name]}, 0.1)
    model = load_model(tmp_path, dtype, DEVICE)
    experts = model.layers[0].experts
    is_stacked = name == "qwen3 moe" and (dtype is torch.float16 or DEVICE.type == "cuda")
    assert (experts is not None and experts.stacks is not None) == is_stacked
    found = []
    for each in (model, replace(model, backend=TritonBackend(DEVICE))):
        cache = allocate(8, 16, model.config, dtype, DEVICE)
        start, logits = 0, []
        for count in (50, 20, 1):
            tokens = [(7 * n) % 61 for n in range(start, start + count)]
            sequence = ScheduledSequence(0, tokens, start, range(8))
            step = StepBatch([sequence], DeviceState(16, DEVICE)).tensors
            step = replace(step, sample_rows=torch.arange(count, device=DEVICE))
            with torch.inference_mode():
                logits.append(each.forward(step, cache))
            start += count
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
