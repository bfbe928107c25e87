"""The engine's step reports everything once, with the executor inline or on its own thread."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, Pause
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import HostExecutor, execute
from worker.types import FinishReason, ModelOutput, SchedulerOutput

Make = Callable[..., AddRequest]


@pytest.fixture
def core(paged_executor: Callable[[int], Any]) -> EngineCore:
    ticks = iter(range(1000))
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    return EngineCore(scheduler, paged_executor(4), lambda: float(next(ticks)))


def test_no_work_is_no_step(core: EngineCore) -> None:
    assert not core.has_work
    assert core.step() is None


def test_a_step_reports_tokens_times_and_stats(core: EngineCore, make_request: Make) -> None:
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


def test_refusals_and_aborts_are_reported_without_a_step(
    core: EngineCore, make_request: Make
) -> None:
    core.add(make_request("empty", [], branches=["empty too"]))
    core.add(make_request("a", [1]))
    core.abort(["a", "unknown"])
    reported = core.step()
    assert reported is not None
    assert [(o.request_id, o.finish_reason) for o in reported.outputs] == [
        ("empty", FinishReason.ERROR),
        ("empty too", FinishReason.ERROR),
        ("a", FinishReason.ABORT),
    ]
    assert reported.num_scheduled_tokens == 0
    assert not core.has_work


def test_a_request_to_a_paused_engine_shows_in_the_stats(
    core: EngineCore, make_request: Make
) -> None:
    core.command(Pause(1, "keep"))
    core.step()
    core.take_replies()
    core.add(make_request("a", [1]))
    reported = core.step()
    assert reported is not None
    assert (reported.stats.num_waiting, reported.stats.num_deferred) == (1, 1)
    assert not core.has_work


class FailingExecutor(HostExecutor):
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        raise RuntimeError("device lost")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_goes_through(make_request: Make, overlap: bool) -> None:
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, FailingExecutor(), lambda: 0.0, overlap)
    core.add(make_request("a", [1]))
    if overlap:
        core.step()  # hands the step over
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()
    core.shutdown()


class Gate(HostExecutor):
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.permits = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self.begun.release()
        assert self.permits.acquire(timeout=60)
        return execute(self.inner, step)  # type: ignore[no-any-return]


def test_the_next_step_is_handed_over_while_one_runs(
    paged_executor: Callable[[int], Any], make_request: Make
) -> None:
    gate = Gate(paged_executor(4))
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, gate, lambda: 1.5, overlap=True)  # type: ignore[arg-type]
    core.add(make_request("a", [1, 2, 3], max_tokens=3, ignore_eos=True))
    reported = core.step()
    assert reported is not None
    assert (reported.outputs, reported.num_scheduled_tokens) == ([], 0)
    assert gate.begun.acquire(timeout=60)
    assert core.running_step == (1.5, 3)
    tokens = []
    for expected in (3, 1, 1):
        gate.permits.release()
        reported = core.step()
        assert reported is not None
        assert reported.num_scheduled_tokens == expected
        tokens += reported.outputs[0].token_ids
    assert reported.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(tokens) == 3
    assert not core.has_work
    assert core.running_step is None
    core.shutdown()


def test_a_stop_seen_late_costs_a_step_but_no_token(
    paged_executor: Callable[[int], Any], make_request: Make, follow: Callable[..., int]
) -> None:
    """The step in flight gives nothing, and the engine comes to rest."""
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, paged_executor(4), lambda: 0.0, overlap=True)
    first = follow([1, 2, 3], 0)
    core.add(make_request("a", [1, 2, 3], max_tokens=9, stop_token_ids=(first,)))
    outputs, counts = [], []
    while core.has_work:
        reported = core.step()
        if reported is not None:
            outputs += reported.outputs
            counts.append(reported.num_scheduled_tokens)
    assert [(o.token_ids, o.stop_token_id) for o in outputs] == [([first], first)]
    assert counts == [0, 3, 1]
    assert scheduler.blocks.num_free == 8
    core.shutdown()
