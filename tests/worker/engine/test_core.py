"""The engine reports each step once, on any executor, and gives back what memory cannot hold."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.paged_executor import PagedExecutor, next_token
from tests.support.worker.step_driver import make_request, outputs, steps
from tests.support.worker.tier_house import tiers_below
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import Pause, RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.planning import NO_MEMORY
from worker.errors import DeviceMemoryError
from worker.executor.interface import HostExecutor, Ticket, execute
from worker.types import FinishReason, ModelOutput, SchedulerOutput


@pytest.fixture
def core() -> EngineCore:
    ticks = iter(range(1000))
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    return EngineCore(scheduler, PagedExecutor(4), lambda: float(next(ticks)))


def test_no_work_is_no_step(core: EngineCore) -> None:
    assert not core.has_work
    assert core.step() is None


def test_a_step_reports_tokens_times_and_stats(core: EngineCore) -> None:
    core.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=2, ignore_eos=True))
    first, second = core.step(), core.step()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == (5, 1)
    assert first.stats.num_running == 1
    assert first.stats.kv_cache_usage == 0.25
    assert (second.stats.num_running, second.stats.kv_cache_usage) == (0, 0.0)
    (output,) = second.outputs
    assert output.finish_reason is FinishReason.LENGTH
    times = (output.scheduled_seconds, output.first_token_seconds, output.last_token_seconds)
    assert times == (0.0, 1.0, 3.0)


def test_refusals_and_aborts_are_reported_without_a_step(core: EngineCore) -> None:
    core.add(make_request("empty", [], branches=["empty too"]))
    core.add(make_request("a", [1]))
    core.abort(["a", "unknown"])
    reported = core.step()
    assert [(o.request_id, o.finish_reason) for o in reported.outputs] == [
        ("empty", FinishReason.ERROR),
        ("empty too", FinishReason.ERROR),
        ("a", FinishReason.ABORT),
    ]
    assert reported.num_scheduled_tokens == 0
    assert not core.has_work


def test_a_request_to_a_paused_engine_shows_in_the_stats(core: EngineCore) -> None:
    core.command(Pause(1, "keep"))
    core.step()
    core.take_replies()
    core.add(make_request("a", [1]))
    reported = core.step()
    assert (reported.stats.num_waiting, reported.stats.num_deferred) == (1, 1)
    assert not core.has_work


class FailingExecutor(HostExecutor):
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        raise RuntimeError("device lost")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_goes_through(overlap: bool) -> None:
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


def test_the_next_step_is_handed_over_while_one_runs() -> None:
    gate = Gate(PagedExecutor(4))
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, gate, lambda: 1.5, overlap=True)  # type: ignore[arg-type]
    core.add(make_request("a", [1, 2, 3], max_tokens=3, ignore_eos=True))
    reported = core.step()
    assert (reported.outputs, reported.num_scheduled_tokens) == ([], 0)
    assert gate.begun.acquire(timeout=60)
    assert core.running_step == (1.5, 3)
    tokens = []
    for expected in (3, 1, 1):
        gate.permits.release()
        reported = core.step()
        assert reported.num_scheduled_tokens == expected
        tokens += reported.outputs[0].token_ids
    assert reported.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(tokens) == 3
    assert not core.has_work
    assert core.running_step is None
    core.shutdown()


def test_a_stop_seen_late_costs_a_step_but_no_token() -> None:
    """The step in flight gives nothing, and the engine comes to rest."""
    scheduler = Scheduler(CacheConfig(8, 4), SchedulerConfig())
    core = EngineCore(scheduler, PagedExecutor(4), lambda: 0.0, overlap=True)
    first = next_token([1, 2, 3], 0)
    core.add(make_request("a", [1, 2, 3], max_tokens=9, stop_token_ids=(first,)))
    reported = [*steps(core)]
    assert [(o.token_ids, o.stop_token_id) for one in reported for o in one.outputs] == [
        ([first], first)
    ]
    assert [one.num_scheduled_tokens for one in reported] == [0, 3, 1]
    assert scheduler.blocks.num_free == 8
    core.shutdown()


class Spoilt:
    def collect(self) -> ModelOutput:
        raise DeviceMemoryError("no memory left")


class ScarceExecutor(PagedExecutor):
    """Has no memory for steps of more than `capacity` tokens, nor for those whose number is in
    `faults`: one of these has run when it fails ("collect"), or wrote other tokens ("submit").
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.faults: dict[int, str] = {}
        self.capacity = 1 << 30
        self.num_failed = 0
        self._num_submitted = 0

    def submit(self, step: SchedulerOutput) -> Ticket:
        if not step.sequences:
            return super().submit(step)
        self._num_submitted += 1
        is_large = step.num_tokens > self.capacity
        how = "submit" if is_large else self.faults.get(self._num_submitted)
        if how is None:
            return super().submit(step)
        self.num_failed += 1
        if how == "collect":
            super().submit(step)
            return Spoilt()
        self._move(step)
        for sequence in step.sequences:
            for position in range(sequence.start, sequence.start + sequence.num_tokens):
                self._slots[self._slot(sequence.block_table, position)] = (99, position)
        raise DeviceMemoryError("no memory left")


# None at the next try, which may be the next but one: what fails again alone ends.
faults = st.dictionaries(
    st.integers(1, 15).map(lambda n: 3 * n), st.sampled_from(["submit", "collect"]), max_size=8
)


@pytest.mark.parametrize("pipe", ["inline", "lazy", "overlapped"])
@examples(120)
@given(
    scene=walks.scenes,
    faults=faults,
    capacity=st.sampled_from([1, 2, 5, 1 << 30]),
    num_slots=st.sampled_from([0, 0, 3, 20]),
)
def test_any_batch_answers_as_each_request_alone(
    pipe: str, scene: walks.Scene, faults: dict[int, str], capacity: int, num_slots: int
) -> None:
    executor = ScarceExecutor(scene.cache.block_size)
    executor.faults = faults
    if scene.limits.enable_chunked_prefill:
        executor.capacity = capacity
    cache, tiers = tiers_below(scene.cache, num_slots)
    scheduler = Scheduler(cache, scene.limits, (walks.END,), [tiers])
    scene.run(scheduler, executor, pipe)
    assert 0 <= scheduler.stats().scheduler.num_out_of_memory <= executor.num_failed


def answers(core: EngineCore) -> tuple[dict[str, list[int]], list[RequestOutput]]:
    found: dict[str, list[int]] = {}
    endings = []
    for output in outputs(core):
        found.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            endings.append(output)
    return found, endings


def engine(executor: PagedExecutor, **limits: Any) -> tuple[EngineCore, Scheduler]:
    scheduler = Scheduler(CacheConfig(128, 4), SchedulerConfig(**limits))
    return EngineCore(scheduler, executor, lambda: 0.0, overlap=True), scheduler


def test_steps_shrink_to_what_there_is_memory_for_and_grow_again() -> None:
    requests = [
        make_request(str(i), [1 + i % 3] * (1 + 3 * i), max_tokens=40, ignore_eos=True)
        for i in range(8)
    ]
    outcomes = []
    for capacity in (1 << 30, 5):
        executor = ScarceExecutor(4)
        executor.capacity = capacity
        core, scheduler = engine(executor, max_num_batched_tokens=32, max_num_seqs=8)
        for request in requests:
            core.add(request)
        outcomes.append(answers(core)[0])
        stats = scheduler.stats()
        core.shutdown()
        assert (
            bool(stats.scheduler.num_out_of_memory)
            == bool(stats.scheduler.num_preemptions)
            == (capacity == 5)
        )
    assert outcomes[0] == outcomes[1]
    sizes = [step.num_tokens for step in executor.steps]
    assert max(sizes) <= 5
    assert stats.scheduler.num_out_of_memory > 3  # it tries again what it cannot know


@pytest.mark.parametrize("chunked", [True, False])
def test_a_request_that_fails_alone_ends_with_an_error(chunked: bool) -> None:
    is_long = 20

    class Narrow(ScarceExecutor):
        def submit(self, step: SchedulerOutput) -> Ticket:
            ends = (s.start + s.num_tokens for s in step.sequences)
            self.capacity = 0 if max(ends, default=0) > is_long else 1 << 30
            return super().submit(step)

    executor = Narrow(4)
    core, scheduler = engine(
        executor, max_num_batched_tokens=64, max_model_len=60, enable_chunked_prefill=chunked
    )
    for name, length in (("a", 3), ("long", 30), ("b", 4)):
        core.add(make_request(name, [len(name)] * length, max_tokens=9, ignore_eos=True))
    found, endings = answers(core)
    core.shutdown()
    reasons = {ending.request_id: (ending.finish_reason, ending.error) for ending in endings}
    assert reasons.pop("long") == (FinishReason.ERROR, NO_MEMORY)
    assert reasons == dict.fromkeys(("a", "b"), (FinishReason.LENGTH, None))
    assert {name: len(tokens) for name, tokens in found.items()} == {"a": 9, "b": 9, "long": 0}
    assert scheduler.stats().scheduler.num_corrupted_requests == 0


def test_a_request_aborted_after_its_step_failed_leaves_nothing_behind() -> None:
    executor = ScarceExecutor(4)
    executor.capacity = 0
    core, scheduler = engine(executor)
    core.add(make_request("a", [1]))
    while not scheduler.stats().scheduler.num_out_of_memory:
        core.step()
    core.step()  # the second try is handed over
    core.abort(["a"])
    _, [ending] = answers(core)
    core.shutdown()
    assert ending.finish_reason is FinishReason.ABORT
    assert scheduler.blocks.usage == 0.0
