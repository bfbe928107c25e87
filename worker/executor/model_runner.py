"""The executor that runs a real model: plain ints in, sampled tokens out.

Weights moved from the device to the host's memory and back, in place.

The tensors stay the objects they are, so nothing that holds one (a tied head, a fused layer) has to
learn about it; only the memory behind them goes and comes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

# Before torch loads OpenMP, which reads it once: threads that wait by spinning stall each other for
# hundreds of milliseconds a step as soon as anything else runs on their cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps a compiled product for every number of rows it has seen, by default for a thousand
# shapes and over a megabyte each; steps have any number of rows. A few dozen serve a steady batch.
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

import torch
from torch import Tensor

from worker.config import EngineConfig
from worker.errors import ConfigError
from worker.executor.answers import PendingAnswers, Verification
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import draft_requests
from worker.executor.drafting.loading import drafter_bytes_per_token, network_loader
from worker.executor.interface import Finished, Ticket, with_history
from worker.executor.kv_cache import (
    allocate,
    choose_num_blocks,
    copy_blocks,
    room_bytes,
)
from worker.executor.state import DeviceState
from worker.executor.step_batch import StepBatch
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import CpuKernels, open_kernels
from worker.ops.cpu.sampling import NativeDraws
from worker.ops.draft import PROBABILISTIC
from worker.ops.linear import can_pack, supported_dtype
from worker.ops.rejection import STANDARD, Sums, choose_sums
from worker.ops.sample import TORCH_SAMPLER, Sampler
from worker.types import ModelOutput, ScheduledSequence, SchedulerOutput

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_executor(config: EngineConfig) -> tuple[ModelRunner, int]:
    """Load the model, allocate its KV cache; return the executor and the number of blocks.

    Raises `ModelError` for a checkpoint that cannot be loaded and `ConfigError` for settings that
    cannot work. Sets the process's number of torch threads.
    """
    if config.model_path is None:
        raise ConfigError("--engine torch needs --model")
    path = config.model_path
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = choose_dtype(config.dtype, device, can_pack(torch.bfloat16))
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, device, dtype)
    kernels = choose_kernels(config, device, dtype)
    max_model_len = config.scheduler.max_model_len

    def check(shape: ModelConfig) -> None:
        # What no memory can hold is refused before minutes go into loading.
        choose_num_blocks(config, shape, kv_dtype, device, room_bytes(config, device))

    def load(check: Callable[[ModelConfig], object] | None = None) -> LlamaModel:
        return load_model(path, dtype, device, max_model_len, check, kernels, config.quantization)

    load_network = network_loader(config.speculative, max_model_len)
    with torch.inference_mode():
        model = load(check)
        network = load_network(model) if load_network is not None else None
        extra = drafter_bytes_per_token(network, model, kv_dtype) if network is not None else 0
        room = room_bytes(config, device)
        num_blocks = choose_num_blocks(config, model.config, kv_dtype, device, room, extra)
    blocks, shape = (num_blocks, config.block_size), model.config

    def allocate_cache() -> Tensor:
        return allocate(*blocks, shape, kv_dtype, device)

    chosen = config.speculative
    if chosen is None or load_network is None or network is None:
        return ModelRunner(model, load, allocate_cache), num_blocks
    drafter = CachedDrafter(
        load_network, network, model, blocks, chosen.draft_sample_method, kv_dtype
    )
    draws = chosen.draft_sample_method == PROBABILISTIC
    sums = choose_sums(device) if draws else None
    runner = ModelRunner(model, load, allocate_cache, drafter, chosen.rejection_sample_method, sums)
    return runner, num_blocks


def choose_dtype(name: str, device: torch.device, packs_bfloat16: bool) -> torch.dtype:
    """The torch dtype of a configured name; "auto" is float32 on a CPU, half precision on a GPU.

    Small quantized models have near ties that bfloat16 decides wrongly, so a CPU is exact unless it
    is told otherwise. `packs_bfloat16` is `can_pack`'s answer: without it bfloat16 is
    float32.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype {name} is not one of auto, {', '.join(_DTYPES)}")
        return supported_dtype(_DTYPES[name], device, packs_bfloat16)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32


def choose_kv_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of a KV cache by its configured name; "auto" is that of activations, `dtype`.
    Others work for float32 activations on a CPU; elsewhere they are a `ConfigError`.
    """
    chosen = dtype if name == "auto" else _DTYPES[name]
    if chosen is not dtype and (device.type != "cpu" or dtype is not torch.float32):
        raise ConfigError(
            f"--kv-cache-dtype {name} takes a CPU and --dtype auto or float32; here activations are"
            f" {str(dtype).removeprefix('torch.')}, and so is the cache: leave the flag out"
        )
    return chosen


def choose_kernels(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> CpuKernels | None:
    """The native kernels, of float32 activations on a CPU; None without. Raises `ConfigError` for a
    `quantization` that cannot work.
    """
    kernels = None
    if device.type == "cpu" and dtype is torch.float32:
        kernels = open_kernels(torch.get_num_threads(), config.cpu_activations == "int8")
    if config.quantization == "none":
        return kernels
    flag, speculative = f"--quantization {config.quantization}", config.speculative
    if device.type != "cpu":
        raise ConfigError(f"{flag} is for a CPU, and the worker has a GPU: leave the flag out")
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(f"{flag} goes with --dtype auto or float32, not {config.dtype}")
    if speculative is not None and speculative.method == "eagle":
        raise ConfigError(
            f"{flag}: a draft head is trained for the weights in the file: leave the flag out, or"
            " choose another method in --speculative-config"
        )
    if kernels is None:
        raise ConfigError(
            f"{flag} needs the native kernels, which this package or CPU has not: install it with a"
            " C++ compiler, or leave the flag out"
        )
    return kernels


class ModelRunner:
    """Owns the model, the KV cache and the device's state, and runs steps on them; implements
    `Executor`.

    `load` gives the model again after it was dropped; `allocate_cache` a cache [layers,
    num_blocks, 2, kv_heads, block_size, head_dim] of zeros.
    `drafter` guesses what comes next, where a step asks it to; drafts that it drew from a
    distribution are verified by `rejection_method` with `sums` (None: those for the device).
    """

    def __init__(
        self,
        model: LlamaModel,
        load: Callable[[], LlamaModel],
        allocate_cache: Callable[[], Tensor],
        drafter: CachedDrafter | None = None,
        rejection_method: str = STANDARD,
        sums: Sums | None = None,
    ) -> None:
        self._load = load
        self._allocate_cache = allocate_cache
        self._model: LlamaModel | None = model
        self._offloaded: OffloadedWeights | None = None
        self._drafter = drafter
        self._rejection_method = rejection_method
        self._sums = sums
        kernels = model.kernels
        self._sampler = TORCH_SAMPLER if kernels is None else Sampler(NativeDraws(kernels))
        with torch.inference_mode():
            self._cache: Tensor | None = allocate_cache()
        self._state = DeviceState(self._cache.shape[4], model.device)
        self._is_shut_down = False

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> Ticket:
        """Launch all of a step but the drafts that it asks for."""
        model, cache = self._awake()
        drafter = self._drafter
        if step.block_copies:
            copy_blocks(cache, step.block_copies)
            if drafter is not None:
                drafter.copy_blocks(step.block_copies)
        if not step.sequences:
            return Finished(ModelOutput({}))
        sequences = [self._with_history(sequence) for sequence in step.sequences]
        batch = StepBatch(sequences, self._state)
        verification = None
        if drafter is None:
            hidden = model.hidden(batch.tensors, cache)
        else:
            proposals = drafter.proposals(sequences)
            verification = Verification(proposals, self._rejection_method, self._sums)
            states = model.states(batch.tensors, cache)
            drafter.record(batch, states)
            hidden = states.index_select(0, batch.tensors.sample_rows)
        answers = PendingAnswers(batch, hidden, model.logits, verification, self._sampler)
        answers.store(self._state)
        return _ModelTicket(step, answers, drafter)

    def _with_history(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """With the pending token in the history of draws that look at it; waits for that token."""
        if not sequence.takes_pending or not any(s.params.needs_history for s in sequence.samples):
            return sequence
        return with_history(sequence, self._state.last_token(sequence.seq_id))

    def _awake(self) -> tuple[LlamaModel, Tensor]:
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if self._model is None or self._offloaded is not None or self._cache is None:
            raise RuntimeError("the executor sleeps: wake it before a step")
        return self._model, self._cache

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Drop the KV cache at level 1, the weights too at level 2. At level 1 the weights of a GPU
        move to the host's memory; those of a CPU are there already. Level 0 keeps everything.
        """
        if level < 1:
            return
        self._cache = None
        if self._drafter is not None:
            self._drafter.sleep(level)
        if level > 1:
            self._model = self._offloaded = None
        elif self._model is not None and self._model.device.type != "cpu":
            weights = (self._model, self._drafter and self._drafter.weights)
            self._offloaded = self._offloaded or OffloadedWeights(weights)

    @torch.inference_mode()
    def wake(self, tags: frozenset[str]) -> None:
        """Take back what `sleep` gave away: "weights", read again from the checkpoint after level
        2, and "kv_cache", all zero. Raises `ModelError` if the checkpoint cannot be read any more.
        """
        if self._is_shut_down:
            raise RuntimeError("the executor is shut down")
        if "weights" in tags:
            if self._offloaded is not None:
                self._offloaded.restore()
                self._offloaded = None
            self._model = self._model or self._load()
        if "kv_cache" in tags and self._cache is None:
            self._cache = self._allocate_cache()
        if self._drafter is not None:
            self._drafter.wake(tags, self._model)

    def shutdown(self) -> None:
        """Drop the weights and the cache. Idempotent."""
        self._is_shut_down = True
        self._model = self._cache = self._offloaded = self._drafter = None


@dataclass(frozen=True, slots=True)
class _ModelTicket:
    """A step that was launched."""

    step: SchedulerOutput
    answers: PendingAnswers
    drafter: CachedDrafter | None

    @torch.inference_mode()
    def collect(self) -> ModelOutput:
        """The step's result, with the drafts that it asks for. The draws were waited for, and so
        are the drafts: no device is at work before or after, and the clock sees all of it.
        """
        output = self.answers.collect()
        requests = draft_requests(self.step.sequences, output) if self.drafter is not None else []
        if self.drafter is None or not requests:
            return output
        started = time.perf_counter()
        drafted = self.drafter.propose(requests, self.step.num_tokens)
        seconds = time.perf_counter() - started
        reading = min(drafted.catch_up_seconds, seconds)
        return dataclasses.replace(
            output,
            drafts=drafted.drafts,
            drafting_seconds=seconds - reading,
            catch_up_seconds=reading,
        )


class OffloadedWeights:
    """The weights of a model, held on the host while the device's memory is given back."""

    def __init__(self, model: object) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in _storages(model):
            held = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            held.copy_(storage)
            storage.resize_(0)
            self._held.append((storage, held))

    @property
    def num_bytes(self) -> int:
        """Bytes that the device has back."""
        return sum(held.nbytes() for _, held in self._held)

    def restore(self) -> None:
        """Give every tensor its memory and its values back. Call once."""
        for storage, held in self._held:
            storage.resize_(held.nbytes())
            storage.copy_(held)
        self._held.clear()


def _storages(model: object) -> list[torch.UntypedStorage]:
    """The memory behind every dense tensor of the model, each once however many share it."""
    dense = (tensor for tensor in _tensors(model) if tensor.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in dense)
    return list({storage.data_ptr(): storage for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in dataclasses, sequences and plain objects, to any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif type(value).__module__.startswith("worker."):
        for item in vars(value).values():
            yield from _tensors(item)
