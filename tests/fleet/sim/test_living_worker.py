"""A simulated worker on the loop's clock serves requests, and frees those that are closed."""

import asyncio
from contextlib import aclosing

import pytest

from fleet.sim.living_worker import LivingWorker, WorkerSettings
from fleet.sim.virtual_time import run_in_virtual_time
from worker.config import CacheConfig, SchedulerConfig, SimConfig

SETTINGS = WorkerSettings(
    SimConfig(
        prefill_tokens_per_second=100.0, decode_base_seconds=1.0, decode_per_sequence_seconds=0.0
    ),
    SchedulerConfig(max_num_seqs=2),
    CacheConfig(16, 16),
)


def test_tokens_arrive_at_the_end_of_their_step() -> None:
    async def main() -> list[float]:
        worker = LivingWorker(SETTINGS)
        living = asyncio.create_task(worker.run())
        await asyncio.sleep(5.0)
        times = []
        async with aclosing(worker.answer("a", [300] * 10, 3)) as outputs:
            async for output in outputs:
                times += [asyncio.get_running_loop().time()] * len(output.token_ids)
        assert worker.num_requests == 0
        living.cancel()
        return times

    assert run_in_virtual_time(main()) == pytest.approx([5.1, 6.1, 7.1])


def test_a_request_that_is_given_up_frees_its_place() -> None:
    async def main() -> None:
        worker = LivingWorker(SETTINGS)
        living = asyncio.create_task(worker.run())
        async with aclosing(worker.answer("a", [300] * 10, 9)) as outputs:
            await anext(outputs)
        await asyncio.sleep(3.0)
        assert (worker.stats.num_running, worker.stats.kv_cache_usage) == (0, 0.0)
        living.cancel()

    run_in_virtual_time(main())
