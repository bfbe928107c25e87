"""Measures the GPU memory of steps and graphs, before the KV cache gets the rest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from worker.config import SchedulerConfig
from worker.types import SampleSpec, SamplingParams, ScheduledSequence, SchedulerOutput

# The largest consumers: a sort of the vocabulary, and a copy of the logits.
_DRAW = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, presence_penalty=0.1)


class DeviceMemory(Protocol):
    """The memory of one device. All numbers are bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """Return the unallocated and the total memory."""

    def held(self) -> int:
        """Return the memory that this process holds."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the peak of held memory while `run` runs, above the present level."""


class CudaMemory:
    """Implements `DeviceMemory` with the statistics of torch's allocator, fragments included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_of(self, run: Callable[[], object]) -> int:
        # Memory that torch caches would hide what the run takes.
        give_back(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.held()
        result = run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - before
        # The trial of graphs returns a model runner, which owns a cache.
        del result
        give_back(self._device)
        return peak


def give_back(device: torch.device) -> None:
    """Wait for a GPU, and free the memory that torch caches for later allocations."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def largest_step(
    limits: SchedulerConfig, block_size: int, adapter_slot: int | None = None
) -> SchedulerOutput:
    """Build the largest step, with one sequence at the longest context; it writes to block 0. The
    first sequence has the adapter.
    """
    longest = limits.max_model_len
    num_tokens = limits.max_num_batched_tokens
    num_seqs = min(limits.max_num_seqs, num_tokens)
    num_prompts = 1
    while num_prompts < num_seqs and num_tokens - (num_seqs - num_prompts) > num_prompts * longest:
        num_prompts += 1
    num_decoding = num_seqs - num_prompts
    left = min(num_tokens - num_decoding, num_prompts * longest)
    sequences = []
    for index in range(num_prompts):
        length = left // (num_prompts - index)
        left -= length
        sequences.append(_share(index, 0, length, block_size))
    for index in range(num_decoding):
        start = longest - 1 if index == 0 else min(1, longest - 1)
        sequences.append(_share(num_prompts + index, start, 1, block_size))
    sequences[0] = replace(sequences[0], adapter_slot=adapter_slot)
    return SchedulerOutput(0, tuple(sequences))


def _share(seq_id: int, start: int, length: int, block_size: int) -> ScheduledSequence:
    end = start + length
    table = (0,) * -(-end // block_size)
    draw = SampleSpec(_DRAW, end, history=(0,), num_prompt=1)
    return ScheduledSequence(seq_id, [0] * length, start, table, (draw,))
