"""A virtual fleet in which endpoints fail, or say nothing of their load any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from random import Random

import pytest
from virtual_fleet import Answer, Call, FleetSettings, VirtualFleet

from fleet.sim.virtual_time import run_in_virtual_time
from picker.outliers.breaker import EndpointState
from picker.outliers.detector import OutlierDetector
from picker.types import EndpointMetrics

GATE = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
BAD = "default/worker-1"
SECOND_TO_FIRST_TOKEN = 0.5  # that a client would have


def healthy_fleet(workers: int = 4) -> tuple[VirtualFleet, OutlierDetector]:
    """A fleet whose picker remembers."""
    memory = OutlierDetector(rng=Random(1))
    fleet = VirtualFleet(FleetSettings(workers=workers), memory)
    fleet.datastore.subscribe(memory.pool_changed)
    return fleet, memory


async def arrivals(fleet: VirtualFleet, rate: float, seconds: float, rng: Random) -> list[Answer]:
    """Poisson arrivals of completions of many lengths; all answers."""
    until = asyncio.get_running_loop().time() + seconds
    tasks = []
    async with asyncio.TaskGroup() as group:
        while asyncio.get_running_loop().time() < until:
            call = Call(
                "tenant",
                num_prompt=min(2000, 1 + int(rng.lognormvariate(5, 0.8))),
                num_output=min(400, 1 + int(rng.lognormvariate(3.2, 0.8))),
            )
            tasks.append(group.create_task(fleet.ask(call)))
            await asyncio.sleep(rng.expovariate(rate))
    return [task.result() for task in tasks]


@cache
def goodput(change: Callable[[VirtualFleet], None] | None, config: str | None) -> int:
    """How many of the same arrivals are served in time, when a fleet changes after a second."""

    async def run() -> list[Answer]:
        async with VirtualFleet(FleetSettings(config=config)) as fleet:
            if change is not None:
                asyncio.get_running_loop().call_later(1.0, change, fleet)
            return await arrivals(fleet, 130.0, 3.0, Random(3))

    answers = run_in_virtual_time(run())
    assert len(answers) > 300
    return sum(
        one.ttft_seconds is not None and one.ttft_seconds <= SECOND_TO_FIRST_TOKEN
        for one in answers
    )


def freeze(fleet: VirtualFleet) -> None:
    """No scrape comes through any more."""
    fleet.scrapes = False


def freeze_with_lies(fleet: VirtualFleet) -> None:
    """And the last ones have shown one endpoint idle and the others full."""
    now = asyncio.get_running_loop().time()
    for key in fleet.endpoint_keys:
        full = key != BAD
        metrics = EndpointMetrics(50 * full, 50 * full, 0.9 * full, updated_at_seconds=now)
        fleet.datastore.update_metrics(key, metrics)
    freeze(fleet)


@pytest.mark.parametrize(
    ("config", "change"),
    [(None, freeze), (None, freeze_with_lies), (GATE, freeze)],
    ids=["as it is built in", "with lies at the end", "with flow control"],
)
def test_without_metrics_hardly_a_request_is_lost(
    config: str | None, change: Callable[[VirtualFleet], None]
) -> None:
    """Own counts route on: at least 95 % of what is served in time with fresh metrics."""
    assert goodput(change, config) >= 0.95 * goodput(None, config)


def test_an_endpoint_that_fails_costs_few_answers_and_comes_back() -> None:
    """Through the whole picker: three requests, a probe now and then, and its share once well."""

    async def run() -> tuple[VirtualFleet, OutlierDetector, list[Answer]]:
        fleet, memory = healthy_fleet()
        loop = asyncio.get_running_loop()
        async with fleet:
            everybody = fleet.datastore.snapshot().candidates
            fleet.datastore.set_endpoints(one.endpoint for one in everybody[1:])
            await arrivals(fleet, 60.0, 1.0, Random(2))
            fleet.failing.add(BAD)
            fleet.datastore.set_endpoints(one.endpoint for one in everybody)
            failing_until = loop.time() + 6.0
            loop.call_at(failing_until, fleet.failing.discard, BAD)
            answers = await arrivals(fleet, 60.0, 16.0, Random(3))
            assert failing_until + 10.0 <= loop.time()
        return fleet, memory, answers

    fleet, memory, answers = run_in_virtual_time(run())
    failed = [one for one in answers if one.status == 500]
    sent = fleet.received[BAD]
    assert 5 <= len(failed) <= 3 + 4
    assert all(after - before >= 1.0 for before, after in pairwise(sent[2 : len(failed)]))
    assert memory.views(sent[-1])[BAD].state is EndpointState.HEALTHY
    assert len([at for at in sent if at >= answers[-1].arrived_seconds - 2.0]) >= 20
    memory.check_integrity()


def test_a_whole_fleet_that_fails_is_used_all_the_same() -> None:
    """Every request is sent somewhere: an error of an endpoint, never a refusal of the picker."""

    async def run() -> list[Answer]:
        fleet, _ = healthy_fleet(workers=2)
        async with fleet:
            fleet.failing.update(fleet.endpoint_keys)
            return await arrivals(fleet, 50.0, 3.0, Random(3))

    assert {one.status for one in run_in_virtual_time(run())} == {500}
