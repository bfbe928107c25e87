"""The size of the KV cache follows the configuration or the memory, and is refused when useless."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.config import EngineConfig, SchedulerConfig
from worker.errors import ConfigError
from worker.executor.kv_cache import (
    SuspectBlocks,
    choose_num_blocks,
    copy_blocks,
    gpu_room_bytes,
)
from worker.models.config import ModelConfig
from worker.types import ScheduledSequence

CPU = torch.device("cpu")
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
CONFIG = EngineConfig("torch", "model", scheduler=SchedulerConfig(max_model_len=1000))


def blocks(config: EngineConfig, room: int | None = None) -> int:
    """Blocks chosen for the little model in float32."""
    return choose_num_blocks(config, MODEL, torch.float32, CPU, room)


def test_an_explicit_number_wins() -> None:
    """The override is taken as it is."""
    config = replace(CONFIG, num_blocks_override=70, kv_cache_memory_bytes=1 << 30)
    assert blocks(config) == 70


def test_memory_is_divided_into_whole_blocks() -> None:
    """A budget in bytes gives as many blocks as fit in it."""
    config = replace(CONFIG, kv_cache_memory_bytes=100 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert blocks(config) == 100


def test_the_default_holds_no_more_than_can_be_used() -> None:
    """Every sequence at its longest is enough."""
    few = SchedulerConfig(max_model_len=1000, max_num_seqs=2)
    assert blocks(replace(CONFIG, scheduler=few)) == 2 * 63
    many = SchedulerConfig(max_model_len=1000, max_num_seqs=10**9)
    assert blocks(replace(CONFIG, scheduler=many)) == (1 << 30) // BLOCK_BYTES


def test_no_more_is_taken_than_there_is_room_for() -> None:
    """Of little memory as many blocks as fit; of plenty what can be used."""
    assert blocks(CONFIG, 70 * BLOCK_BYTES + 1) == 70
    assert blocks(CONFIG, 1 << 40) == blocks(CONFIG)


@pytest.mark.parametrize(
    ("changes", "room", "reason"),
    [
        (
            {"num_blocks_override": 10},
            None,
            "10 blocks (0 MiB) cannot hold --max-model-len 1000: raise --num-gpu-blocks-override"
            " to 63, or lower --max-model-len to 160",
        ),
        (
            {"kv_cache_memory_bytes": BLOCK_BYTES},
            None,
            f"1 blocks (0 MiB) cannot hold --max-model-len 1000: raise --kv-cache-memory-bytes to"
            f" {63 * BLOCK_BYTES}, or lower --max-model-len to 16",
        ),
        (
            {},
            62 * BLOCK_BYTES,
            "62 blocks (0 MiB), all that is its share of the available memory, cannot hold"
            f" --max-model-len 1000: free memory, or set --kv-cache-memory-bytes to"
            f" {63 * BLOCK_BYTES}, or lower --max-model-len to 992",
        ),
        (
            {"fits_max_model_len": True},
            BLOCK_BYTES - 1,
            "0 blocks (0 MiB), all that is its share of the available memory, cannot hold"
            f" --max-model-len 512: free memory, or set --kv-cache-memory-bytes to"
            f" {32 * BLOCK_BYTES}",
        ),
    ],
    ids=["blocks", "bytes", "memory", "no memory"],
)
def test_a_cache_smaller_than_one_sequence_is_refused(
    changes: dict[str, Any], room: int | None, reason: str
) -> None:
    """The message names the flags that help, and the values that do."""
    with pytest.raises(ConfigError) as caught:
        blocks(replace(CONFIG, **changes), room)
    assert str(caught.value) == f"a KV cache of {reason}"


def test_a_context_that_nobody_asked_for_is_cut() -> None:
    """To what the memory holds, or what the user gave the cache, down to 512 tokens."""
    config = replace(CONFIG, fits_max_model_len=True)
    assert blocks(config, 40 * BLOCK_BYTES) == 40
    assert blocks(replace(config, num_blocks_override=32)) == 32
    short = SchedulerConfig(max_model_len=100)
    assert blocks(replace(config, scheduler=short, num_blocks_override=7)) == 7


@pytest.mark.parametrize(
    ("free", "taken", "utilization", "room"),
    [
        (950, 50, 0.92, 870),  # alone
        (450, 50, 0.92, 370),  # beside another worker
        (950, 50, 0.25, 200),
        (700, 50, 0.25, 200),  # the second of two that share
        (970, 10, 0.98, 950),
        (60, 10, 0.92, 0),
        (900, 300, 0.25, 0),
    ],
)
def test_a_gpu_is_shared_by_the_parts_that_workers_may_take(
    free: int, taken: int, utilization: float, room: int
) -> None:
    """A worker's weights count for its part, and what others hold is no part of anyone's."""
    assert gpu_room_bytes(free, 1000, taken, utilization) == room


def test_a_length_beyond_the_models_context_is_refused() -> None:
    """No cache makes a model attend further than it can."""
    with pytest.raises(ConfigError, match="context of 4096 tokens"):
        blocks(replace(CONFIG, scheduler=SchedulerConfig(max_model_len=4097)))


def test_copies_read_every_source_before_they_write() -> None:
    """Swapping two blocks in one list swaps them in every layer."""
    cache = torch.arange(3 * 4).view(3, 4, 1, 1, 1, 1).float()
    copy_blocks(cache, ((0, 1), (1, 0)))
    assert cache[:, :, 0, 0, 0, 0].tolist() == [[1, 0, 2, 3], [5, 4, 6, 7], [9, 8, 10, 11]]


def run(start: int, count: int, *table: int) -> ScheduledSequence:
    """A sequence that runs `count` tokens from `start` in blocks of 4."""
    return ScheduledSequence(1, [0] * count, start, table)


def spoiled(num_blocks: int = 6) -> torch.Tensor:
    """A cache of blocks of 4 tokens that hold anything but numbers."""
    return torch.full((2, num_blocks, 2, 1, 4, 8), torch.nan)


def clean_slots(cache: torch.Tensor) -> dict[int, list[int]]:
    """Slots that are zero everywhere, by block."""
    zero = (cache == 0).all(dim=-1).all(dim=3).all(dim=2).all(dim=0)
    return {block: row.nonzero().flatten().tolist() for block, row in enumerate(zero) if row.any()}


def test_a_suspect_block_is_zeroed_when_it_is_written_afresh() -> None:
    """Its whole content is dead then, and after that it is like any other; others stay."""
    suspects, cache = SuspectBlocks(), spoiled()
    suspects.add(run(3, 2, 4, 5), 4)
    suspects.clean(cache, [run(0, 3, 5), run(0, 2, 1)])
    assert clean_slots(cache) == {5: [0, 1, 2, 3]}
    assert len(suspects) == 1
    cache.fill_(torch.nan)
    suspects.clean(cache, [run(0, 3, 5)])
    assert clean_slots(cache) == {}


def test_of_a_suspect_block_that_goes_on_only_the_rest_is_zeroed() -> None:
    """Tokens that a sequence has there are its own, and a block not written to is left alone."""
    suspects, cache = SuspectBlocks(), spoiled()
    suspects.add(run(0, 8, 2, 3), 4)
    suspects.clean(cache, [run(6, 1, 2, 3)])
    assert clean_slots(cache) == {3: [2, 3]}
    suspects.clean(cache, [run(7, 6, 2, 3, 4, 5)])
    assert clean_slots(cache) == {3: [2, 3]}
    assert len(suspects) == 2


def test_suspicion_follows_copies() -> None:
    """A copy is as suspect as its source was, also when the same list overwrites that source."""
    suspects = SuspectBlocks()
    suspects.add(run(0, 1, 1), 4)
    suspects.follow(((1, 2), (3, 1)))
    cache = spoiled()
    suspects.clean(cache, [run(0, 8, 1, 2)])
    assert clean_slots(cache) == {2: [0, 1, 2, 3]}
    suspects.add(run(0, 1, 1), 4)
    suspects.clear()
    assert len(suspects) == 0
