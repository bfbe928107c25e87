"""Replicas that keep a Lease of the fake API server, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

from in_process_kube_api import InProcessKubeApi
from kube_api.clock import LoopClock
from kube_api.server import KubeApi

from picker.k8s.elector import Timings
from picker.k8s.lease import Clocks, LeaseKeeper, LeaseName
from picker.metrics.picker_metrics import PickerMetrics

LEASE = LeaseName("default", "epp-default-pool.llm-d.ai")
TIMINGS = Timings()
SOON = 0.1


@dataclass
class Replica:
    """A keeper, its way to the server, its metrics and the task that it is."""

    keeper: LeaseKeeper
    api: InProcessKubeApi
    metrics: PickerMetrics
    task: asyncio.Task[None]

    async def killed(self) -> None:
        """As by SIGKILL: nothing is given back."""
        self.api.away = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def counted(self, name: str, **labels: str) -> float | None:
        """A series of its lease."""
        labels = {"lease": LEASE.name, **labels}
        return self.metrics.registry.get_sample_value(f"pointsman_{name}", labels)


@dataclass
class LeaseScene:
    """The server and who was started; `most` is how many ever led at a time."""

    server: KubeApi
    replicas: dict[str, Replica] = field(default_factory=dict)
    most: int = 0

    def start(self, name: str, token: str = "", timings: Timings = TIMINGS) -> Replica:
        """One more replica."""
        api, metrics = InProcessKubeApi(self.server, Random(1), token), PickerMetrics()

        @asynccontextmanager
        async def connect() -> AsyncIterator[InProcessKubeApi]:
            yield api

        clocks = Clocks(asyncio.get_running_loop().time, lambda: datetime(2026, 1, 1, tzinfo=UTC))
        series = metrics.kubernetes.election
        keeper = LeaseKeeper(
            connect, LEASE, name, timings, series, clocks=clocks, rng=Random(len(self.replicas))
        )
        replica = Replica(keeper, api, metrics, asyncio.create_task(keeper.run()))
        self.replicas[name] = replica
        return replica

    @property
    def leaders(self) -> list[str]:
        """Who says that it leads."""
        found = [name for name, one in self.replicas.items() if one.keeper.is_leader()]
        self.most = max(self.most, len(found))
        return found

    @property
    def spec(self) -> dict[str, Any]:
        """What the Lease says."""
        found: dict[str, Any] = self.server.read("leases", LEASE.name)["spec"]
        return found

    def write(self, spec: Any) -> None:
        """A Lease of somebody else's."""
        metadata = {"name": LEASE.name, "namespace": LEASE.namespace}
        version = "coordination.k8s.io/v1"
        lease = {"apiVersion": version, "kind": "Lease", "metadata": metadata, "spec": spec}
        self.server.write(lease)

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for what must come within `seconds`; how long it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not condition():
            assert loop.time() - began <= seconds, f"not within {seconds} s: {self.leaders}"
            await asyncio.sleep(0.01)
            _ = self.leaders
        return loop.time() - began

    async def watched(self, seconds: float) -> list[set[str]]:
        """Who led during so many seconds, as sets that differ from each other."""
        seen: list[set[str]] = []
        for _ in range(round(seconds / 0.05)):
            await asyncio.sleep(0.05)
            now = set(self.leaders)
            if seen[-1:] != [now]:
                seen.append(now)
        return seen


@asynccontextmanager
async def electing(*names: str) -> AsyncIterator[LeaseScene]:
    """Replicas of these names, the first of which leads. Two never did, in the end."""
    scene = LeaseScene(KubeApi(LoopClock()))
    try:
        for name in names:
            scene.start(name)
            await scene.until(lambda: bool(scene.leaders), SOON)
        yield scene
        assert scene.most <= 1, "two led at a time"
    finally:
        for one in scene.replicas.values():
            one.task.cancel()
        tasks = [one.task for one in scene.replicas.values()]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [one for one in ended if isinstance(one, Exception)]
