"""The engine's step tells everything once, and steps on the paged executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.scheduler import Scheduler
from worker.types import FinishReason, ModelOutput, SchedulerOutput


@pytest.fixture
def core(paged_executor: Callable[[int], Any]) -> EngineCore:
    """A small engine whose clock ticks once per look."""
    ticks = iter(range(1000))
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    return EngineCore(scheduler, paged_executor(4), lambda: float(next(ticks)))


def test_no_work_is_no_step(core: EngineCore) -> None:
    """An idle engine has nothing to tell."""
    assert not core.has_work
    assert core.step() is None


def test_a_step_reports_tokens_times_and_stats(
    core: EngineCore, make_request: Callable[..., AddRequest]
) -> None:
    """One message per step: outputs, the work done, and the state after it."""
    core.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=2, ignore_eos=True))
    first, second = core.step(), core.step()
    assert first is not None
    assert second is not None
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == (5, 1)
    assert first.stats.num_running == 1
    assert first.stats.kv_cache_usage == 0.25
    assert (second.stats.num_running, second.stats.kv_cache_usage) == (0, 0.0)
    (output,) = second.outputs
    assert output.finish_reason is FinishReason.LENGTH
    times = (output.scheduled_seconds, output.first_token_seconds, output.last_token_seconds)
    assert times == (0.0, 1.0, 3.0)


def test_refusals_and_aborts_are_told_without_a_step(
    core: EngineCore, make_request: Callable[..., AddRequest]
) -> None:
    """They come with the next message even when nothing runs, and only once."""
    core.add(make_request("empty", []))
    core.add(make_request("a", [1]))
    core.abort(["a", "unknown"])
    told = core.step()
    assert told is not None
    assert [(o.request_id, o.finish_reason) for o in told.outputs] == [
        ("empty", FinishReason.ERROR),
        ("a", FinishReason.ABORT),
    ]
    assert told.num_scheduled_tokens == 0
    assert not core.has_work


class FailingExecutor:
    """Implements `Executor`; every step fails."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Fail."""
        raise RuntimeError("device lost")

    def shutdown(self) -> None:
        """Nothing to give back."""


def test_a_failed_step_goes_through(make_request: Callable[..., AddRequest]) -> None:
    """The core does not hide that the device failed."""
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, FailingExecutor(), lambda: 0.0)
    core.add(make_request("a", [1]))
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()
