"""Size and memory of the paged KV cache."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.config import EngineConfig
from worker.errors import ConfigError
from worker.models.config import ModelConfig
from worker.types import ScheduledSequence

# On a CPU the cache is this much, or what the context needs, up to a share of the memory.
_CPU_DEFAULT_BYTES = 1 << 30
_CPU_MEMORY_SHARE = 0.25


def choose_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    drafter_token_bytes: int = 0,
) -> int:
    """Blocks the cache shall have: what the configuration says, else what memory allows; a drafter
    on the device keeps `drafter_token_bytes` for each token beside it.

    Raises `ConfigError` when they cannot hold one sequence of `max_model_len` tokens, or when that
    is more than the model can attend to.
    """
    max_model_len = config.scheduler.max_model_len
    if max_model_len > model.max_context:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's context of "
            f"{model.max_context} tokens"
        )
    token_bytes = model.kv_elements_per_token * dtype.itemsize + drafter_token_bytes
    block_bytes = config.block_size * token_bytes
    num_blocks = config.num_blocks_override
    if num_blocks is None:
        num_blocks = _budget_bytes(config, block_bytes, device) // block_bytes
    blocks_needed = -(-max_model_len // config.block_size)
    if num_blocks < blocks_needed:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks ({num_blocks * block_bytes >> 20} MiB) cannot hold "
            f"--max-model-len {max_model_len}: raise --kv-cache-memory-bytes to "
            f"{blocks_needed * block_bytes}, or lower --max-model-len to "
            f"{num_blocks * config.block_size}"
        )
    return num_blocks


def _budget_bytes(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    sequence_bytes = -(-config.scheduler.max_model_len // config.block_size) * block_bytes
    wanted = max(_CPU_DEFAULT_BYTES, sequence_bytes)
    useful = config.scheduler.max_num_seqs * sequence_bytes
    return min(wanted, useful, int(_available_bytes() * _CPU_MEMORY_SHARE))


def _available_bytes() -> int:
    """Memory the machine could still give, without swapping."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The cache [layers, num_blocks, 2 (K, V), kv_heads, block_size, head_dim], all zero.

    Zero matters: a masked key weighs 0, and 0 times whatever memory held before may be NaN.
    """
    shape = (model.num_layers, num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
    return zeros(shape, dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU its pages are only taken when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def copy_blocks(cache: Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    """Copy blocks (source, destination) over all layers; all are read before any is written."""
    pairs = torch.tensor(copies, dtype=torch.int64, device=cache.device)
    cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]


class SuspectBlocks:
    """Blocks that may hold keys or values that are not finite numbers, since a sequence that had
    them failed. The only owner of that knowledge.

    A sequence reads blocks in which it has tokens, and behind its last token what its last block
    held before: masked, but 0 times nan is nan. So before a sequence writes to a suspect block, all
    that it does not hold in it is set to zero. Costs nothing while there are none.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, sequence: ScheduledSequence, block_size: int) -> None:
        """Suspect every block in which the sequence has tokens after this step."""
        num_tokens = sequence.start + len(sequence.token_ids)
        self._blocks.update(sequence.block_table[: -(-num_tokens // block_size)])

    def follow(self, copies: Sequence[tuple[int, int]]) -> None:
        """A copy of a suspect block is as suspect as the block."""
        sources = self._blocks.copy()
        for source, destination in copies:
            if source in sources:
                self._blocks.add(destination)
            else:
                self._blocks.discard(destination)

    def clean(self, cache: Tensor, sequences: Sequence[ScheduledSequence]) -> None:
        """Before a step: zero, in suspect blocks that it writes to, the slots from the first it
        writes on. cache [layers, num_blocks, 2, kv_heads, block_size, head_dim].
        """
        if not self._blocks:
            return
        block_size = cache.shape[4]
        for sequence in sequences:
            end = sequence.start + len(sequence.token_ids)
            first = sequence.start // block_size
            for index in range(first, -(-end // block_size)):
                block = sequence.block_table[index]
                if block not in self._blocks:
                    continue
                kept = sequence.start % block_size if index == first else 0
                cache[:, block, :, :, kept:].zero_()
                if kept == 0:
                    self._blocks.discard(block)

    def clear(self) -> None:
        """Suspect nothing: the cache is new."""
        self._blocks.clear()
