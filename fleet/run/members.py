"""The processes that currently make up a fleet, and which of them receive requests."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from fleet.envoy import probe
from fleet.envoy.bootstrap import build, endpoints_document, pickers_document, to_yaml
from fleet.envoy.settings import SocketAddress
from fleet.errors import FleetError
from fleet.run.layout import (
    DISAGGREGATED_CONFIG,
    EnvoyPlan,
    FleetPlan,
    PickerPlan,
    WorkerPlan,
    endpoints_yaml,
)
from fleet.run.process import Child, Program, Reaper

Say = Callable[[str], None]


PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class Member(Generic[PlanT]):
    plan: PlanT
    child: Child


Worker = Member[WorkerPlan]
Picker = Member[PickerPlan]
Envoy = Member[EnvoyPlan]


class Members:
    """Owns all processes ever created, until they have ended: `kill` reaches all of them."""

    def __init__(self, layout: FleetPlan, guard: Reaper, say: Say) -> None:
        self._guard, self._say = guard, say
        self._made: list[Child] = []
        self.workers = [self.new_worker(one) for one in layout.workers]
        self.sidecars = [
            self._made_of(one.plan, one.plan.sidecar, partial(_serves, one.plan))
            for one in self.workers
            if one.plan.sidecar is not None
        ]
        self.front = (
            None
            if layout.front is None
            else self._made_of(layout.ingress, layout.front, lambda: _listens(layout.ingress))
        )
        self.picker = self.new_picker(layout.picker())
        self.envoy = self.new_envoy(layout.envoy())

    @property
    def children(self) -> list[Child]:
        self._made = [child for child in self._made if not child.has_ended]
        return list(self._made)

    def new_worker(self, plan: WorkerPlan) -> Worker:
        return self._made_of(plan, plan.program, partial(_serves, plan))

    def new_picker(self, plan: PickerPlan) -> Picker:
        return self._made_of(plan, plan.program, lambda: probe.until(plan.http, "/readyz"))

    def new_envoy(self, plan: EnvoyPlan) -> Envoy:
        return self._made_of(
            plan, plan.program, lambda: probe.until(plan.admin, "/ready"), plan.again
        )

    def _made_of(
        self,
        plan: PlanT,
        program: Program,
        is_ready: Callable[[], Awaitable[object]],
        again: Program | None = None,
    ) -> Member[PlanT]:
        child = Child(program, self._guard, is_ready, self._say, again)
        self._made.append(child)
        return Member(plan, child)

    def kill(self) -> None:
        for child in self.children:
            child.kill()


async def _serves(plan: WorkerPlan) -> None:
    await probe.until(plan.address, "/health")


async def _listens(address: SocketAddress) -> None:
    """Wait for any answer, even from a server that is not ready yet."""
    await probe.until(address, "/", lambda reply: reply.status > 0)


def write_bootstrap(plan: EnvoyPlan) -> None:
    plan.bootstrap_path.write_text(to_yaml(build(plan.bootstrap)), encoding="utf-8")


async def arrive(child: Child, group: asyncio.TaskGroup, limit_seconds: float) -> None:
    """Return once the child is ready. Raises `FleetError` only once it is completely removed."""
    name = child.program.name
    running = group.create_task(_contained(child), name=name)
    try:
        async with asyncio.timeout(limit_seconds):
            await child.settled.wait()
    except TimeoutError as error:
        text = f"{name} not ready after {limit_seconds:g} s{child.last_words()}"
        raise FleetError(text) from error
    finally:
        if not child.ready.is_set():
            child.kill()
            await asyncio.wait([running])
    if not child.ready.is_set():
        raise child.failure or FleetError(f"{name} was stopped")


async def _contained(child: Child) -> None:
    """Run the child; a failure before it was ready is raised by `arrive` and ends no other part."""
    with contextlib.suppress(FleetError):
        await child.run()


class Rotation:
    """Writes the files by which parts enter and leave service, each replaced as a whole."""

    def __init__(self, layout: FleetPlan) -> None:
        self._plan = layout

    def endpoints(self, workers: Mapping[str, SocketAddress]) -> None:
        text = endpoints_yaml(workers, self._plan.options.objectives, self._plan.roles)
        _replace(self._plan.endpoints_path, text)

    def config(self) -> None:
        """Write the picker's configuration, unless it is the user's or the built-in one."""
        if self._plan.disaggregated_path is not None:
            _replace(self._plan.disaggregated_path, DISAGGREGATED_CONFIG)

    def pool(self, workers: Iterable[SocketAddress]) -> None:
        _replace(self._plan.pool_path, endpoints_document(list(workers)))

    def pickers(self, pickers: Iterable[PickerPlan]) -> None:
        known = [(one.ext_proc, one.health) for one in pickers]
        _replace(self._plan.pickers_path, pickers_document(known))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)  # Envoy notices nothing else
