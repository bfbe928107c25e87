"""The executor that runs a real model: plain ints in, sampled tokens out."""

from __future__ import annotations

import os

# Before torch loads OpenMP, which reads it once: threads that wait by spinning stall each other for
# hundreds of milliseconds a step as soon as anything else runs on their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from worker.config import EngineConfig
from worker.errors import ConfigError
from worker.executor.input_batch import CacheLayout, InputBatch
from worker.executor.kv_cache import allocate, choose_num_blocks, copy_blocks
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.sample import sample
from worker.types import Draw, ModelOutput, SchedulerOutput

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_executor(config: EngineConfig) -> tuple[ModelRunner, int]:
    """Load the model, allocate its KV cache; return the executor and the number of blocks.

    Raises `ModelError` for a checkpoint that cannot be loaded and `ConfigError` for settings that
    cannot work. Sets the process's number of torch threads.
    """
    if config.model_path is None:
        raise ConfigError("--engine torch needs --model")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(config.dtype, device)
    with torch.inference_mode():
        model = load_model(config.model_path, dtype, device)
        num_blocks = choose_num_blocks(config, model.config, dtype, device)
        cache = allocate(num_blocks, config.block_size, model.config, dtype, device)
    return ModelRunner(model, cache), num_blocks


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a configured name; "auto" is float32 on a CPU, half precision on a GPU.

    Small quantized models have near ties that bfloat16 decides wrongly, so a CPU is exact unless it
    is told otherwise; bfloat16 is about 1.6 times as fast there (benchmarks/worker_engine.py) if
    the CPU has AVX512_BF16.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype {name} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32


class ModelRunner:
    """Owns the model and the KV cache, its only state, and runs steps on them."""

    def __init__(self, model: LlamaModel, cache: Tensor) -> None:
        self._model: LlamaModel | None = model
        self._cache: Tensor | None = cache
        self._layout = CacheLayout(block_size=cache.shape[4], kv_heads=cache.shape[3])

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step to its end; the tokens drawn, by sequence id."""
        model, cache = self._model, self._cache
        if model is None or cache is None:
            raise RuntimeError("the executor is shut down")
        if step.block_copies:
            copy_blocks(cache, step.block_copies)
        if not step.sequences:
            return ModelOutput({})
        batch = InputBatch(step.sequences, self._layout, model.dtype, model.device)
        logits = model.forward(batch.tensors, cache)
        if not batch.sampled:
            return ModelOutput({})
        tokens = sample(logits, [spec for _, spec in batch.sampled])
        drawn: dict[int, tuple[Draw, ...]] = {}
        for (seq_id, _), token in zip(batch.sampled, tokens, strict=True):
            drawn[seq_id] = (*drawn.get(seq_id, ()), Draw(token))
        return ModelOutput(drawn)

    def sleep(self, level: int) -> None:
        """Drop the KV cache, and the weights at level 2."""
        raise NotImplementedError

    def wake(self, tags: frozenset[str]) -> None:
        """Take back what `sleep` gave away."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Drop the weights and the cache. Idempotent."""
        self._model = self._cache = None
