"""A simulated worker on the loop's clock: its totals are those of its model (docs/simulator.md)."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

import pytest

from fleet.sim.living_worker import LivingWorker, WorkerSettings
from fleet.sim.virtual_time import run_in_virtual_time
from worker.config import CacheConfig, SchedulerConfig
from worker.sim.config import SimConfig

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


SLOTS, BLOCK_SIZE = 16, 16
Asks = list[tuple[int, int]]  # tokens of each prompt and of its answer


@dataclass(frozen=True)
class Totals:
    """Seconds of the whole run, and of a request on average."""

    makespan: float
    mean_latency: float


def served(sim: SimConfig, asks: Asks, gap: float = 0.0, num_blocks: int = 4096) -> Totals:
    async def main() -> Totals:
        limits = SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=8192)
        cache = CacheConfig(num_blocks, BLOCK_SIZE, enable_partial_hits=False)
        worker, loop = LivingWorker(WorkerSettings(sim, limits, cache)), asyncio.get_running_loop()
        living = asyncio.create_task(worker.run())

        async def latency(number: int, num_prompt: int, num_output: int) -> float:
            await asyncio.sleep(number * gap)
            prompt = Random(number).choices(range(256, 1280), k=num_prompt)
            answered = await worker.serve(str(number), prompt, num_output, lambda: None)
            assert len(answered.token_ids) == num_output
            return loop.time() - number * gap

        latencies = await asyncio.gather(*(latency(n, *ask) for n, ask in enumerate(asks)))
        living.cancel()
        return Totals(loop.time(), sum(latencies) / len(latencies))

    return run_in_virtual_time(main())


def close(expected: Totals, tolerance: float) -> object:
    return pytest.approx((expected.makespan, expected.mean_latency), rel=tolerance)


def test_a_saturated_worker_of_the_linear_model() -> None:
    """Only the number of steps depends on the schedule, and a full batch makes it tokens / slots.
    By Little's law a request is served for slots · makespan / requests, and begins at a time spread
    evenly over the rest.
    """
    sim = SimConfig(
        prefill_tokens_per_second=20_000.0,
        decode_base_seconds=0.010,
        decode_per_sequence_seconds=0.0002,
        prefill_context_seconds=1e-8,
        kv_read_seconds=1e-7,
    )
    rng = Random(1)
    asks = [(rng.randrange(16, 256), rng.randrange(3, 14)) for _ in range(1250)]
    outputs = sum(output for _, output in asks)
    # Token n of an answer (from 2) is drawn after reading the prompt and n - 1 tokens.
    read = sum((n - 1) * prompt + n * (n - 1) / 2 for prompt, n in asks)
    makespan = (
        sum(prompt for prompt, _ in asks) / sim.prefill_tokens_per_second
        + sum(p * (p + 1) / 2 for p, _ in asks) * sim.prefill_context_seconds
        + (outputs - len(asks)) * sim.decode_per_sequence_seconds
        + read * sim.kv_read_seconds
        + outputs / SLOTS * sim.decode_base_seconds
    )
    alone = SLOTS * makespan / len(asks)
    seen = served(sim, asks)
    expected = Totals(makespan, alone + (makespan - alone) / 2)
    assert (seen.makespan, seen.mean_latency) == close(expected, 0.01)


def test_one_request_after_the_other_of_the_llm_d_model() -> None:
    sim = SimConfig(
        latency_model="llm-d",
        inter_token_latency_seconds=0.012,
        inter_token_latency_std_seconds=0.002,
        prefill_overhead_seconds=0.030,
        prefill_per_token_seconds=0.00025,
        prefill_std_seconds=0.005,
        time_factor_under_load=2.0,
    )
    rng = Random(2)
    asks = [(rng.randrange(16, 512), rng.randrange(1, 32)) for _ in range(300)]
    each = [0.030 + prompt * 0.00025 + (output - 1) * 0.012 for prompt, output in asks]
    seen = served(sim, asks, gap=10.0)
    expected = Totals((len(asks) - 1) * 10.0 + each[-1], sum(each) / len(each))
    assert (seen.makespan, seen.mean_latency) == close(expected, 0.01)


def test_full_batches_of_the_dynamo_model() -> None:
    """All requests are equal and as many arrive at once as there are slots, so every wave takes one
    step of prompts and then steps of decoding at a known use of the cache, exactly.
    """
    num_prompt, num_output, num_waves, num_blocks = 64, 24, 4, 256
    total = SLOTS * num_prompt
    milliseconds = 4.209989e-7 * total**2 + 1.518344e-2 * total + 16.50142
    for n in range(1, num_output):
        usage = SLOTS * (num_prompt + n) / (num_blocks * BLOCK_SIZE)
        milliseconds += max(1.0, -25.74 * usage**2 + 54.01 * usage + 5.74)
    wave = milliseconds / 1e3
    asks = [(num_prompt, num_output)] * SLOTS * num_waves
    seen = served(SimConfig(latency_model="dynamo"), asks, num_blocks=num_blocks)
    expected = Totals(num_waves * wave, wave * (num_waves + 1) / 2)
    assert (seen.makespan, seen.mean_latency) == close(expected, 1e-9)
