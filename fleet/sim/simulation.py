"""One fleet under one load, from the first request to the last answer."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from fleet.bench.driver import Driver
from fleet.bench.flags import LoadSettings
from fleet.bench.load import StageLoad, draws_of, drive
from fleet.bench.summary import Stage
from fleet.bench.workload import Sessions
from fleet.sim.client import TokenForm, TokenTexts, VirtualClient
from fleet.sim.flags import Event
from fleet.sim.virtual_fleet import Simulation, VirtualFleet
from fleet.sim.virtual_time import run_in_virtual_time

_RARELY = (100_000, 50, 100)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A sender of load; `objective` has the priority that the simulation gives it."""

    name: str
    settings: LoadSettings
    load: StageLoad
    sessions: Sessions
    objective: str = ""


def simulate(simulation: Simulation, tenants: Sequence[Tenant], draws: int) -> list[Stage]:
    """Simulate; `draws` numbers a run's stages, whose arrivals differ. Raises `ConfigError`."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*_RARELY)  # most objects of a simulation live to its end
    try:
        return run_in_virtual_time(_simulated(simulation, tenants, draws))
    finally:
        gc.set_threshold(*thresholds)


async def _simulated(simulation: Simulation, tenants: Sequence[Tenant], draws: int) -> list[Stage]:
    loop = asyncio.get_running_loop()
    rngs = [draws_of(simulation.seed, draws, number) for number in range(len(tenants))]
    texts = TokenTexts(rngs[0].getrandbits(32))  # all tenants' groups are the same ones
    form = TokenForm(simulation.worker.template_tokens)
    async with VirtualFleet(simulation) as fleet:
        for event in simulation.events:
            loop.call_at(event.at_seconds, _happens, fleet, event)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(_stage(fleet, one, form, texts, rng))
                for one, rng in zip(tenants, rngs, strict=True)
            ]
        return [one.result() for one in running]


async def _stage(
    fleet: VirtualFleet, tenant: Tenant, form: TokenForm, texts: TokenTexts, rng: Random
) -> Stage:
    clock = asyncio.get_running_loop().time
    client = VirtualClient(fleet, tenant.objective)
    settings = tenant.settings
    driver = Driver(client, form, clock, settings.think, settings.requests)
    sessions = tenant.sessions(texts, rng)
    await drive(driver, tenant.load, settings, sessions, rng)
    return Stage(
        tenant.name, driver.begun, clock(), settings.warmup, driver.outcomes, driver.pulses, None
    )


def _happens(fleet: VirtualFleet, event: Event) -> None:
    if event.kind == "add":
        fleet.add(event.number)
    elif event.kind == "kill":
        fleet.kill(event.number)
    elif event.kind == "drain":
        fleet.drain(event.number)
    else:
        fleet.slow(event.number, event.factor)
