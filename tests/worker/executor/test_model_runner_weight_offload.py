"""Weights leave the device's memory and come back as they were."""

from pathlib import Path

import torch

from worker.executor.model_runner import OffloadedWeights
from worker.models.llama import LlamaModel
from worker.models.loader import load_model


def dense_model(path: Path) -> LlamaModel:
    return load_model(path, torch.float16, torch.device("cpu"))


@torch.inference_mode()
def test_weights_come_back_to_the_bit(tiny_checkpoint: Path) -> None:
    model, twin = dense_model(tiny_checkpoint), dense_model(tiny_checkpoint)
    away = OffloadedWeights(model)
    storage = model.embedding.weight.untyped_storage()
    assert storage.nbytes() == 0
    num_weights = 96 * 64 + 64 + 2 * (64 * (64 + 32 + 32 + 64 + 80 + 80 + 80) + 2 * 64)
    rope_bytes = 2 * 512 * 16 * 4
    assert away.num_bytes == 2 * num_weights + rope_bytes
    away.restore()
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(model.embedding.weight, twin.embedding.weight)
    assert torch.equal(model.logits(hidden), twin.logits(hidden))
    assert model.embedding.weight.untyped_storage().data_ptr() == storage.data_ptr()
