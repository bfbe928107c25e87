"""The approximate worker and the exact one, on the same requests; and its cache events."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.sim.fast_worker import BlockCache, FastWorker, chain
from fleet.sim.living_worker import Answered, LivingWorker, WorkerGoneError, WorkerSettings
from fleet.sim.virtual_time import run_in_virtual_time
from tests.depth import examples
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheEvent
from worker.sim.config import SimConfig

WORKER = WorkerSettings(
    SimConfig(
        prefill_tokens_per_second=1000.0,
        decode_base_seconds=0.01,
        decode_per_sequence_seconds=0.001,
    ),
    SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8),
    CacheConfig(128, 16),
)
Request = tuple[float, list[int], int]  # at seconds, the prompt, tokens asked for
Result = tuple[float, float, Answered]  # seconds to the first token, and in all


def served(worker: LivingWorker | FastWorker, requests: Sequence[Request]) -> list[Result]:
    async def one(at: float, prompt: list[int], num_output: int) -> Result:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at)
        first: list[float] = []
        name = f"request at {at}"
        answered = await worker.serve(
            name, prompt, num_output, lambda: first.append(loop.time() - at)
        )
        return first[0], loop.time() - at, answered

    async def main() -> list[Result]:
        living = asyncio.create_task(worker.run())
        results = await asyncio.gather(*(one(*each) for each in requests))
        living.cancel()
        if isinstance(worker, FastWorker):
            worker.check_integrity()
            assert worker.stats.kv_cache_usage == pytest.approx(0.0, abs=1e-9)
        return list(results)

    return run_in_virtual_time(main())


def fast(settings: WorkerSettings = WORKER) -> FastWorker:
    return FastWorker(settings, lambda _: None, lambda: asyncio.get_running_loop().time())


def arrivals(rate: float, count: int, rng: Random) -> list[Request]:
    heads = [rng.choices(range(256, 1280), k=160) for _ in range(6)]
    at, requests = 0.0, list[Request]()
    for _ in range(count):
        at += rng.expovariate(rate)
        tail = rng.choices(range(256, 1280), k=rng.randint(5, 60))
        requests.append((at, rng.choice(heads) + tail, rng.randint(8, 40)))
    return requests


def test_a_single_request_takes_exactly_the_time_of_the_model() -> None:
    requests: list[Request] = [(1.0, list(range(100)), 10)]
    for worker in (fast(), LivingWorker(WORKER)):
        [(first, whole, answered)] = served(worker, requests)
        assert first == pytest.approx(0.1)
        assert whole == pytest.approx(0.1 + 9 * 0.011)
        assert list(answered.gaps) == pytest.approx([0.011] * 9)
        assert len(answered.token_ids) == 10


@pytest.mark.parametrize(("overlaps", "waits"), [(False, 0.007), (True, 0.018)])
def test_a_request_waits_for_a_scheduled_step(overlaps: bool, waits: float) -> None:
    """It arrives 4 ms into a step; with overlap, the next one is already scheduled."""
    settings = replace(WORKER, overlaps=overlaps)
    requests: list[Request] = [(0.0, list(range(100)), 40), (0.137, list(range(200, 250)), 5)]
    for worker in (fast(settings), LivingWorker(settings)):
        first, whole, _ = served(worker, requests)[1]
        assert first == pytest.approx(waits + 0.05 + 0.011)
        assert whole == pytest.approx(first + 4 * 0.012)


@pytest.mark.parametrize("rate", [2.0, 6.0, 12.0])
def test_under_load_it_is_near_the_exact_one(rate: float) -> None:
    requests = arrivals(rate, 150, Random(f"{rate}"))
    near, exact = served(fast(), requests), served(LivingWorker(WORKER), requests)
    for number in (0, 1):
        ours, theirs = (sorted(one[number] for one in each) for each in (near, exact))
        assert statistics.median(ours) == pytest.approx(statistics.median(theirs), rel=0.1)
        assert ours[142] == pytest.approx(theirs[142], rel=0.15)  # p95
    cached = [sum(one[2].num_cached for one in each) for each in (near, exact)]
    assert cached[0] == pytest.approx(cached[1], rel=0.1)


def test_blocks_that_run_out_cost_a_preemption() -> None:
    """Eight answers need twice the number of blocks; all of them complete, some late."""
    small = replace(WORKER, cache=CacheConfig(16, 16))
    requests: list[Request] = [(0.001 * n, [1000 + n] * 16, 48) for n in range(8)]
    results = served(fast(small), requests)
    assert [len(one[2].token_ids) for one in results] == [48] * 8
    assert [len(one[2].gaps) for one in results] == [47] * 8
    assert max(max(one[2].gaps) for one in results) > 0.1
    for first, whole, answered in results:
        assert first + sum(answered.gaps) == pytest.approx(whole)


@examples(40)
@given(st.integers(0, 2**32), st.floats(0.5, 60.0), st.integers(8, 64))
def test_counts_add_up_under_random_load(seed: int, rate: float, num_blocks: int) -> None:
    """Every answer is whole, and at the end no block is in use (see `served`)."""
    worker = replace(WORKER, cache=CacheConfig(num_blocks, 16))
    requests = arrivals(rate, 25, Random(seed))
    for (_, prompt, num_output), (first, whole, answered) in zip(
        requests, served(fast(worker), requests), strict=True
    ):
        assert len(answered.gaps) == num_output - 1
        assert answered.num_cached < len(prompt)
        assert first + sum(answered.gaps) == pytest.approx(whole)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_dead_worker_fails_present_and_future_requests(is_fast: bool) -> None:
    worker = fast() if is_fast else LivingWorker(WORKER)

    async def main() -> list[float]:
        loop, failed = asyncio.get_running_loop(), list[float]()
        living = asyncio.create_task(worker.run())
        loop.call_at(0.5, worker.die)
        for at in (0.0, 1.0):
            await asyncio.sleep(max(0.0, at - loop.time()))
            with pytest.raises(WorkerGoneError):
                await worker.serve("one", [1] * 50, 500, lambda: None)
            failed.append(loop.time())
        living.cancel()
        return failed

    assert run_in_virtual_time(main()) == [0.5, 1.0]


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_slow_worker_takes_a_multiple(is_fast: bool) -> None:
    worker = fast() if is_fast else LivingWorker(WORKER)
    worker.slowness = 3.0
    [(first, whole, _)] = served(worker, [(0.0, list(range(100)), 10)])
    assert (first, whole) == pytest.approx((0.3, 3 * (0.1 + 9 * 0.011)))


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_worker_that_becomes_slow_ends_its_step_first(is_fast: bool) -> None:
    worker = fast() if is_fast else LivingWorker(WORKER)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        living = asyncio.create_task(worker.run())
        loop.call_at(0.1255, setattr, worker, "slowness", 3.0)
        await worker.serve("one", list(range(100)), 10, lambda: None)
        living.cancel()
        return loop.time()

    assert run_in_virtual_time(main()) == pytest.approx(0.1 + 3 * 0.011 + 6 * 0.033)


SIZE = 4


def test_subscribers_receive_stored_and_evicted_blocks() -> None:
    """Ends are evicted before beginnings."""
    published: list[CacheEvent] = []

    def publish(events: Sequence[CacheEvent]) -> None:
        published.extend(events)

    cache, tokens = BlockCache(publish), list(range(12))
    names = chain(tokens, SIZE, [], 3)
    cache.stored(tokens, names[:2], 0, SIZE)
    cache.stored(tokens, names, 2, SIZE)
    cache.add_free(names)
    cache.evict(1)
    cache.flush()
    first, second, *removed = published
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert first.parent is None
    assert second.parent == first.blocks[-1].digest
    assert [one.token_ids for one in (*first.blocks, *second.blocks)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
    ]
    stored = [one.digest for one in (*first.blocks, *second.blocks)]
    assert removed == [BlockRemoved(stored[2]), BlockRemoved(stored[1])]
    assert cache.match(names, 3) == 1
