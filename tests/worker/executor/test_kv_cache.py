"""The size of the KV cache follows the configuration or the memory, and is refused when useless."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.config import EngineConfig, SchedulerConfig
from worker.errors import ConfigError
from worker.executor import kv_cache
from worker.executor.kv_cache import (
    choose_num_blocks,
    copy_blocks,
    gathered,
    gpu_room_bytes,
    read_tokens,
    write_tokens,
)
from worker.models.config import ModelConfig
from worker.types import KvLoad

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
    return choose_num_blocks(config, MODEL, torch.float32, CPU, room)


def test_an_explicit_number_wins() -> None:
    config = replace(CONFIG, num_blocks_override=70, kv_cache_memory_bytes=1 << 30)
    assert blocks(config) == 70


def test_memory_is_divided_into_whole_blocks() -> None:
    config = replace(CONFIG, kv_cache_memory_bytes=100 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert blocks(config) == 100


def test_the_default_holds_no_more_than_can_be_used() -> None:
    """A cache for every sequence at its longest is enough."""
    few = SchedulerConfig(max_model_len=1000, max_num_seqs=2)
    assert blocks(replace(CONFIG, scheduler=few)) == 2 * 63
    many = SchedulerConfig(max_model_len=1000, max_num_seqs=10**9)
    assert blocks(replace(CONFIG, scheduler=many)) == (1 << 30) // BLOCK_BYTES


def test_the_cache_never_exceeds_the_room() -> None:
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
    with pytest.raises(ConfigError) as caught:
        blocks(replace(CONFIG, **changes), room)
    assert str(caught.value) == f"a KV cache of {reason}"


def test_a_default_context_is_cut() -> None:
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
    with pytest.raises(ConfigError, match="context of 4096 tokens"):
        blocks(replace(CONFIG, scheduler=SchedulerConfig(max_model_len=4097)))


def test_copies_read_every_source_before_they_write() -> None:
    cache = torch.arange(3 * 4).view(3, 4, 1, 1, 1, 1).float()
    copy_blocks(cache, ((0, 1), (1, 0)))
    assert cache[:, :, 0, 0, 0, 0].tolist() == [[1, 0, 2, 3], [5, 4, 6, 7], [9, 8, 10, 11]]


@pytest.mark.parametrize("across", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 2)])
@pytest.mark.parametrize("num_tokens", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_kv_of_tokens_moves_between_caches(
    across: tuple[bool, bool], sizes: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    caches = [
        torch.randn(2, 24, 2, 3, size, 8, generator=torch.Generator().manual_seed(size)).to(dtype)
        for size in sizes
    ]
    # Eight-bit floats are compared as bytes.
    seen = [cache.view(torch.uint8) if dtype.itemsize == 1 else cache for cache in caches]
    source = [5, 3, 11, 2, 7, 1][: -(-num_tokens // sizes[0])]
    target = torch.randperm(24)[: -(-num_tokens // sizes[1])].tolist()
    before = seen[1].clone()
    data = read_tokens(caches[0], source, num_tokens, across[0])
    assert data.nbytes == num_tokens * 2 * 2 * 3 * 8 * dtype.itemsize
    write_tokens(caches[1], KvLoad(tuple(target), (memoryview(bytearray(data)),)), across[1])
    assert read_tokens(caches[1], target, num_tokens, across[1]) == data
    # The same in memory that is given, and out of it.
    memory = torch.zeros(len(target) * caches[1][:, 0].nbytes, dtype=torch.uint8)
    read = read_tokens(caches[1], target, num_tokens, across[1], memory)
    assert (read.data_ptr(), read.numpy().data) == (memory.data_ptr(), data)
    other = torch.zeros_like(caches[1])
    write_tokens(other, KvLoad(tuple(target), (read,)), across[1])
    assert read_tokens(other, target, num_tokens, across[1]) == data
    for position in range(num_tokens):
        block, slot = source[position // sizes[0]], position % sizes[0]
        keys, values = seen[0][:, block].unbind(1)
        if across[0]:
            keys = keys.reshape(2, 3, 8, sizes[0]).transpose(2, 3)
        expected = torch.stack((keys[:, :, slot], values[:, :, slot]), 1)
        size = data.nbytes // num_tokens
        found = torch.frombuffer(
            bytearray(data[size * position : size * (position + 1)]), dtype=seen[0].dtype
        )
        assert torch.equal(found.view(2, 2, 3, 8), expected)
    others = [block for block in range(24) if block not in target]
    assert torch.equal(seen[1][:, others], before[:, others])
    rest = num_tokens % sizes[1]
    if rest:  # what follows in the last block
        assert torch.equal(seen[1][:, target[-1], 1, :, rest:], before[:, target[-1], 1, :, rest:])


def test_blocks_are_gathered_as_they_are_read() -> None:
    cache = torch.randn(2, 24, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    blocks = (9, 1, 7)
    rows = gathered(cache, blocks).reshape(-1).view(torch.uint8).numpy()
    assert rows.data == read_tokens(cache, blocks, 12, False)


@pytest.mark.parametrize(
    ("num_tokens", "num_parts"), [(1, 1), (16, 1), (21, 1), (27, 1), (16, 4), (28, 7)]
)
def test_kv_is_written_in_the_pieces_that_a_full_device_has_room_for(
    num_tokens: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = kv_cache._write, 1

    def scarce(cache: torch.Tensor, load: KvLoad, keys_across: bool) -> None:
        if len(load.blocks) > room:
            raise torch.OutOfMemoryError
        write(cache, load, keys_across)

    monkeypatch.setattr(kv_cache, "_write", scarce)
    cache = torch.randn(2, 24, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    blocks = (9, 1, 7, 3, 20, 5, 11)[: -(-num_tokens // 4)]
    data = read_tokens(cache, range(12, 12 + len(blocks)), num_tokens, False)
    size = len(data) // num_parts
    parts = (bytearray(data[n * size : (n + 1) * size]) for n in range(num_parts))
    load = KvLoad(blocks, tuple(map(memoryview, parts)))
    write_tokens(cache, load, False)
    assert read_tokens(cache, blocks, num_tokens, False) == data
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        write_tokens(cache, load, False)
