"""A step that the device has too little memory for is taken back, and no answer is another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from tests.support.worker import engine_walk as walks
from tests.support.worker.paged_executor import TOKEN_BYTES, PagedExecutor
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.cache.tiers import Tiers
from worker.engine.core import EngineCore
from worker.engine.features.tiered_cache import TieredCache
from worker.engine.messages import AddRequest, Command, RequestOutput
from worker.engine.pipeline import InlinePipeline, OverlappedPipeline, Pipeline
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.sequences.planning import NO_MEMORY
from worker.errors import DeviceMemoryError
from worker.executor.interface import Ticket
from worker.types import FinishReason, ModelOutput, SchedulerOutput

Make = Callable[..., AddRequest]
PIPELINES: dict[str, Callable[[Any], Pipeline]] = {
    "inline": InlinePipeline,
    "lazy": lambda executor: InlinePipeline(executor, depth=2),
    "overlapped": OverlappedPipeline,
}


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


@pytest.mark.parametrize("pipe", sorted(PIPELINES))
@examples(120)
@given(
    cache=walks.caches,
    limits=walks.limits_of_a_step,
    load=walks.loads,
    orders=walks.commands,
    faults=faults,
    capacity=st.sampled_from([1, 2, 5, 1 << 30]),
    num_slots=st.sampled_from([0, 0, 3, 20]),
)
def test_any_batch_answers_as_each_request_alone(
    pipe: str,
    cache: CacheConfig,
    limits: SchedulerConfig,
    load: list[walks.Arrival],
    orders: list[tuple[int, Command]],
    faults: dict[int, str],
    capacity: int,
    num_slots: int,
) -> None:
    executor = ScarceExecutor(cache.block_size)
    executor.faults = faults
    if limits.enable_chunked_prefill:
        executor.capacity = capacity
    has_tiers = num_slots > 0 and cache.enable_prefix_caching
    size = cache.block_size * TOKEN_BYTES
    memory = memoryview(bytearray(num_slots * size))
    tiers = TieredCache(lambda root, record: Tiers(memory, size, root, "lru", record))
    features = [tiers if has_tiers else None]
    cache = replace(cache, record_evictions=has_tiers)
    scheduler = Scheduler(cache, limits, (walks.END,), features)
    core = EngineCore(scheduler, executor, lambda: 0.0, pipeline=PIPELINES[pipe](executor))
    try:
        walk = walks.Walk(core, scheduler, load)
        walk.run(limits, orders)
        walk.check(orders)
    finally:
        core.shutdown()
    assert 0 <= scheduler.stats().scheduler.num_out_of_memory <= executor.num_failed


def answers(core: EngineCore) -> tuple[dict[str, list[int]], list[RequestOutput]]:
    found: dict[str, list[int]] = {}
    endings = []
    while core.has_work:
        reported = core.step()
        for output in reported.outputs if reported is not None else ():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                endings.append(output)
    return found, endings


def engine(executor: PagedExecutor, **limits: Any) -> tuple[EngineCore, Scheduler]:
    scheduler = Scheduler(CacheConfig(128, 4), SchedulerConfig(**limits))
    return EngineCore(scheduler, executor, lambda: 0.0, overlap=True), scheduler


def test_steps_shrink_to_what_there_is_memory_for_and_grow_again(make_request: Make) -> None:
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
def test_a_request_that_fails_alone_ends_with_an_error(make_request: Make, chunked: bool) -> None:
    """The smallest step is tried twice; the other requests are answered."""
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


def test_a_request_aborted_after_its_step_failed_leaves_nothing_behind(make_request: Make) -> None:
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
