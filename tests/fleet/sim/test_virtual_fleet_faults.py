"""A virtual fleet whose picker loses the metrics of its workers."""

import asyncio
from collections.abc import Callable
from functools import cache
from random import Random

import pytest

from fleet.sim.virtual_fleet import Simulation, VirtualFleet, VirtualPicker
from fleet.sim.virtual_time import run_in_virtual_time
from picker.types import EndpointMetrics

GATE = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
STALE_AFTER_SECONDS = 2.0
SECOND_TO_FIRST_TOKEN = 0.5  # the objective of a client


class FreezingFleet(VirtualFleet):
    """Its scrapes fail once it is frozen; the picker marks metrics as stale after a while."""

    is_frozen = False

    def _scrape(self, picker: VirtualPicker) -> None:
        if not self.is_frozen:
            super()._scrape(picker)
            return
        now = asyncio.get_running_loop().time()
        for one in picker.datastore.snapshot().candidates:
            metrics = one.metrics
            if metrics is not None and now - metrics.updated_at_seconds > STALE_AFTER_SECONDS:
                picker.datastore.mark_stale(one.key)
        if picker.gate is not None:
            picker.gate.pool_changed()


async def arrivals(fleet: VirtualFleet, rate: float, seconds: float, rng: Random) -> list[float]:
    until = asyncio.get_running_loop().time() + seconds
    tasks = []
    async with asyncio.TaskGroup() as group:
        while asyncio.get_running_loop().time() < until:
            num_prompt = min(2000, 1 + int(rng.lognormvariate(5, 0.8)))
            num_output = min(400, 1 + int(rng.lognormvariate(3.2, 0.8)))
            prompt = rng.choices(range(256, 1280), k=num_prompt)
            tasks.append(group.create_task(fleet.ask(prompt, num_output)))
            await asyncio.sleep(rng.expovariate(rate))
    return [task.result().ttft_seconds for task in tasks]


@cache
def goodput(change: Callable[[FreezingFleet], None] | None, config: str | None) -> int:
    async def run() -> list[float]:
        async with FreezingFleet(Simulation(config=config)) as fleet:
            if change is not None:
                asyncio.get_running_loop().call_later(1.0, change, fleet)
            return await arrivals(fleet, 130.0, 3.0, Random(3))

    times = run_in_virtual_time(run())
    assert len(times) > 300
    return sum(time <= SECOND_TO_FIRST_TOKEN for time in times)


def freeze(fleet: FreezingFleet) -> None:
    fleet.is_frozen = True


def freeze_with_lies(fleet: FreezingFleet) -> None:
    now = asyncio.get_running_loop().time()
    datastore = fleet.pickers[0].datastore
    for index, one in enumerate(datastore.snapshot().candidates):
        full = index > 0
        metrics = EndpointMetrics(50 * full, 50 * full, 0.9 * full, updated_at_seconds=now)
        datastore.update_metrics(one.key, metrics)
    freeze(fleet)


@pytest.mark.parametrize(
    ("config", "change"),
    [(None, freeze), (None, freeze_with_lies), (GATE, freeze)],
    ids=["as it is built in", "with lies at the end", "with flow control"],
)
def test_without_metrics_95_percent_are_served_in_time(
    config: str | None, change: Callable[[FreezingFleet], None]
) -> None:
    """Its own counts suffice to serve 95 % of those that are in time with fresh metrics."""
    assert goodput(change, config) >= 0.95 * goodput(None, config)
