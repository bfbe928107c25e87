"""A whole picker in virtual time that learns the latencies of its workers."""

import asyncio
from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest

from fleet.policies import POLICIES
from fleet.sim.living_worker import WorkerSettings
from fleet.sim.virtual_fleet import ServedPrompt, Simulation, VirtualFleet
from fleet.sim.virtual_time import run_in_virtual_time
from worker.config import CacheConfig, SchedulerConfig
from worker.sim.config import SimConfig

NUM_REQUESTS = 500
RATE = 38.0  # two thirds of what four workers can do
LEARNED = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: metrics-data-source}, {type: core-metrics-extractor}, {type: latency-scorer}]
"""
WORKER = WorkerSettings(
    SimConfig(prefill_tokens_per_second=2_400, decode_base_seconds=0.004),
    SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=64, max_model_len=2048),
    CacheConfig(2048, 16),
)


async def _answers(config: str | None, seed: int) -> Sequence[ServedPrompt]:
    rng, tasks = Random(seed), list[asyncio.Task[ServedPrompt]]()
    settings = Simulation(worker=WORKER, config=config, seed=seed)
    async with VirtualFleet(settings) as fleet, asyncio.TaskGroup() as group:
        for _ in range(NUM_REQUESTS):
            length = int(rng.choice((30,) * 6 + (900,)) * rng.uniform(0.5, 1.5))
            prompt = rng.choices(range(256, 1280), k=length)
            tasks.append(group.create_task(fleet.ask(prompt, rng.randint(2, 6))))
            await asyncio.sleep(rng.expovariate(RATE))
    return [task.result() for task in tasks]


@pytest.mark.parametrize("seed", [3, 4])
def test_mixed_lengths_wait_less_where_latencies_are_predicted(seed: int) -> None:
    settled = NUM_REQUESTS // 3
    usual, headroom, costs = (
        run_in_virtual_time(_answers(config, seed))[settled:]
        for config in (None, LEARNED, POLICIES["predicted"])
    )
    assert fmean(one.seconds for one in headroom) < fmean(one.seconds for one in usual)
    assert fmean(one.seconds for one in costs) < fmean(one.seconds for one in usual)
