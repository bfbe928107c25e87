"""The memory of steps and graphs is measured by running them, and is no part of the KV cache."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.model.eagle_heads import LAYOUTS, write_head
from tests.support.model.tiny_llama import TINY, tiny_llama
from tests.support.worker.poisoned_graphs import PoisonedGraphs
from worker.config import EngineConfig, KvTransferConfig, SchedulerConfig
from worker.errors import ConfigError
from worker.executor.adapters import DeviceAdapters
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.loading import HeadNetwork
from worker.executor.graphs import DecodeGraphs
from worker.executor.kv_cache import choose_num_blocks, room_bytes
from worker.executor.memory import largest_step
from worker.executor.start import fitting, step_bytes
from worker.models.eagle_head import load_eagle_head
from worker.ops.lora import AdapterStore, Owners
from worker.ops.step import StepAdapters
from worker.types import ModelOutput

CUDA = torch.device("cuda")
LIMITS = SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=5, max_model_len=64)
CONFIG = EngineConfig("torch", "model", block_size=4, scheduler=LIMITS)


class Fake:
    """A device of 1,000 bytes, 100 of which are held; a trial takes what `peaks` say."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = list(peaks)
        self.tried: list[Any] = []

    def free_and_total(self) -> tuple[int, int]:
        return 850, 1000

    def held(self) -> int:
        return 100

    def peak_of(self, run: Callable[[], object]) -> int:
        self.tried.append(run())
        return self.peaks.pop(0)


@pytest.mark.parametrize(
    ("limits", "lengths", "starts"),
    [
        ((40, 5, 64), [36, 1, 1, 1, 1], [0, 63, 1, 1, 1]),
        ((40, 5, 12), [9, 10, 10, 10, 1], [0, 0, 0, 0, 11]),
        ((40, 5, 36), [36, 1, 1, 1, 1], [0, 35, 1, 1, 1]),
        ((40, 5, 35), [18, 19, 1, 1, 1], [0, 0, 34, 1, 1]),
        ((40, 2, 12), [12, 12], [0, 0]),
        ((3, 8, 64), [1, 1, 1], [0, 63, 1]),
        ((1, 1, 2), [1], [0]),
    ],
)
def test_the_largest_step_is_full(
    limits: tuple[int, int, int], lengths: list[int], starts: list[int]
) -> None:
    step = largest_step(SchedulerConfig(*limits), 4)
    assert [s.num_tokens for s in step.sequences] == lengths
    assert [s.start for s in step.sequences] == starts
    assert all(len(s.samples) == 1 for s in step.sequences)
    assert all(len(s.block_table) * 4 >= s.start + s.num_tokens for s in step.sequences)


class Recorded:
    def __init__(self) -> None:
        self._model = tiny_llama()
        self.rows: list[tuple[int, int]] = []
        self.adapted: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, step: Any, cache: torch.Tensor) -> torch.Tensor:
        return self.states_and_inputs(step, cache, ())[0].index_select(0, step.sample_rows)

    def states_and_inputs(self, step: Any, *args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.rows.append((len(step.token_ids), len(step.sample_rows)))
        if step.adapters is not None:
            self.adapted.add(len(step.token_ids))
        return self._model.states_and_inputs(step, *args)


def test_the_largest_step_and_all_graphs_are_tried() -> None:
    """The graphs are dropped again: they were captured with another cache."""
    model: Any = Recorded()
    memory, device = Fake(30, 70), PoisonedGraphs()
    graphs = DecodeGraphs(device, (2, 4), (11, 16), piece_sizes=(8, 16))
    assert step_bytes(CONFIG, model, torch.float32, memory, graphs) == 100
    assert device.calls.count("capture") == 2 + 2 * (TINY.num_layers + 1)
    assert graphs._captured is None
    assert graphs.pieces._captured is None
    assert {rows for rows, _ in model.rows} == {2, 4, 40}
    output = memory.tried[1]
    assert isinstance(output, ModelOutput)
    assert len(output.sampled) == 5
    for flag in ("kv_cache_memory_bytes", "num_blocks_override"):
        given = dataclasses.replace(CONFIG, **{flag: 9})
        assert step_bytes(given, model, torch.float32, Fake(), None) == 0
    assert step_bytes(CONFIG, model, torch.float32, None, None) == 0  # the host's memory
    alone = Fake(70)
    assert step_bytes(CONFIG, model, torch.float32, alone, None) == 70
    assert model.rows[-2:] == [(1, 1), (40, 5)]


class NullAdapters(AdapterStore):
    def plan(self, owners: Owners) -> StepAdapters:
        return self

    def plan_rows(self, owners: torch.Tensor) -> StepAdapters:
        return self

    def add(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None: ...


def test_steps_with_adapters_are_tried_too() -> None:
    model: Any = Recorded()
    adapters = DeviceAdapters(TINY, 1, NullAdapters())
    graphs = DecodeGraphs(PoisonedGraphs(), (2, 4), (11, 16), plan_rows=adapters.plan_rows)
    assert step_bytes(CONFIG, model, torch.float32, Fake(30, 70), graphs, adapters) == 100
    assert model.adapted == {2, 4, 40}
    assert [rows for rows, _ in model.rows].count(4) == 2


def test_the_largest_step_is_tried_with_what_a_drafter_reads_of_it(tmp_path: Path) -> None:
    """A head takes the states of several layers and of every row."""
    model = tiny_llama(config=dataclasses.replace(TINY, num_layers=6))
    path = write_head(tmp_path, LAYOUTS["eagle3"], model.config)
    network = HeadNetwork(load_eagle_head(path, model, "eagle3"))
    made: list[CachedDrafter] = []

    def make(num_blocks: int) -> CachedDrafter:
        blocks = (num_blocks, CONFIG.block_size)
        made.append(CachedDrafter(lambda _: network, network, model, blocks, "greedy"))
        return made[-1]

    trial = step_bytes(CONFIG, model, torch.float32, Fake(70), None, make_drafter=make)
    assert trial == 70
    assert made[0]._cache is not None
    stored = made[0]._cache.states(np.arange(4, dtype=np.int32))
    assert stored is not None
    assert bool(stored.any())


def test_memory_of_steps_is_no_part_of_the_cache() -> None:
    assert room_bytes(CONFIG, Fake()) == 770


def test_kv_for_other_processes_and_of_them_is_no_part_of_the_cache() -> None:
    """Ranks of tensor parallelism exchange none on their devices."""
    moves = dataclasses.replace(CONFIG, kv_transfer=KvTransferConfig())
    assert room_bytes(moves, Fake()) == 730
    assert room_bytes(dataclasses.replace(moves, tensor_parallel_size=2), Fake()) == 770
    assert room_bytes(CONFIG, Fake(), 200) == 570
    half = dataclasses.replace(CONFIG, gpu_memory_utilization=0.5)
    assert room_bytes(half, Fake(), 200) == 200
    assert room_bytes(half, Fake(), 900) == 0


def test_a_device_too_small_is_refused_with_what_to_lower() -> None:
    class Short(Fake):
        def peak_of(self, run: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError) as caught:
        step_bytes(CONFIG, tiny_llama(), torch.float32, Short(), None)
    assert str(caught.value) == (
        "the device's memory is too small for the largest step beside the weights: lower"
        " --max-num-batched-tokens, --max-num-seqs or --max-model-len"
    )
    with (
        pytest.raises(ConfigError, match=r"too small for the weights: x$"),
        fitting("the weights", "x"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(CONFIG, TINY, torch.float32, CUDA, 5000)
    assert str(caught.value) == (
        "a KV cache of 4 blocks (0 MiB), all that is its share of the available memory beside"
        " weights and steps, cannot hold --max-model-len 64: raise --gpu-memory-utilization, lower"
        " --max-num-batched-tokens or --max-num-seqs, or lower --max-model-len to 16"
    )


def test_a_trial_that_fails_within_a_step_is_refused_alike() -> None:
    model: Any = Recorded()
    model.states_and_inputs = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    with pytest.raises(ConfigError, match="too small for the largest step"):
        step_bytes(CONFIG, model, torch.float32, Fake(1), None)
