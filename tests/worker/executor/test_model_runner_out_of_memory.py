"""A step that the device's memory is too small for fails alone: the engine continues to serve."""

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.depth import by_depth
from tests.support.model.whole_engine import outputs_of, tokens_of
from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor import kv_cache
from worker.executor.model_runner import ModelRunner
from worker.executor.start import build_executor
from worker.models.llama import LlamaModel
from worker.types import SamplingParams


class ScarceModel:
    """Passes with a number in `faults` run, and then end for lack of memory."""

    def __init__(self, model: LlamaModel, faults: set[int]) -> None:
        self._model = model
        self._faults = faults
        self._num_passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, *args: Any) -> torch.Tensor:
        return self._checked(self._model.hidden(*args))

    def states_and_inputs(self, *args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        states, inputs = self._model.states_and_inputs(*args)
        return self._checked(states), inputs

    def _checked(self, made: torch.Tensor) -> torch.Tensor:
        self._num_passes += 1
        if self._num_passes in self._faults:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return made


def requests() -> list[AddRequest]:
    draw = Random(3)
    stem = [draw.randrange(96) for _ in range(21)]
    made = []
    for index in range(10):
        own = [draw.randrange(96) for _ in range(draw.randrange(2, 30))]
        heat = {"temperature": 0.9, "presence_penalty": 0.5} if index % 3 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=12 + index, seed=index, ignore_eos=True, **heat)
        made.append(AddRequest(str(index), (stem if index % 2 else []) + own, params, 0.0))
    return made


def run(checkpoint: Path, faults: set[int], overlap: bool, method: str | None) -> dict[str, Any]:
    speculative = speculation = None
    if method is not None:
        speculative = SpeculativeConfig(
            method, 3, str(checkpoint), 1, 4, enable_adaptive_verification=False
        )
        drafter = build_drafter(speculative)
        speculation = Speculation(speculative, drafter, drafter is None)
    limits = SchedulerConfig(24, 6, 128)
    config = EngineConfig(
        *("torch", str(checkpoint), "float32"),
        block_size=4,
        num_blocks_override=50,
        attention_backend="torch",
        scheduler=limits,
        speculative=speculative,
    )
    executor, num_blocks = build_executor(config)
    assert isinstance(executor, ModelRunner)
    model: Any = ScarceModel(executor._awake()[0], faults)
    executor._model = model
    scheduler = Scheduler(CacheConfig(num_blocks, 4), limits, features=[speculation])
    core = EngineCore(scheduler, executor, lambda: 0.0, overlap)
    answers = tokens_of(outputs_of(core, requests(), after_step=scheduler.check_integrity))
    core.shutdown()
    stats = scheduler.stats()
    assert stats.scheduler.num_out_of_memory == len(faults)
    assert bool(stats.speculation.num_drafts) == (method is not None)
    return answers


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", by_depth(["ngram"], [None, "ngram", "draft_model"]))
def test_no_pass_that_fails_changes_an_answer(
    tiny_checkpoint: Path, method: str | None, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(tiny_checkpoint, set(), overlap, method)
    draw = Random(7)
    for _ in range(4):
        faults = {3 * draw.randrange(1, 12) for _ in range(5)}
        caplog.clear()
        assert run(tiny_checkpoint, faults, overlap, method) == expected
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == len(faults)
        assert "Tried to allocate 2.00 GiB" in warnings[0].getMessage()


def test_blocks_are_copied_whatever_memory_there_is() -> None:
    """Blocks go one by one through the host where all do not fit; sources are read first."""

    class Small(torch.Tensor):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, tuple):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__getitem__(key)

    cache = torch.arange(3 * 4).view(3, 4, 1, 1, 1, 1).float()
    kv_cache.copy_blocks(cache.as_subclass(Small), ((0, 1), (1, 0), (1, 3)))
    assert cache[:, :, 0, 0, 0, 0].tolist() == [[1, 0, 2, 1], [5, 4, 6, 5], [9, 8, 10, 9]]
