"""An autoscaling loop with an API server in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec.structs import replace

from picker.app.shelves import PoolSight
from picker.metrics.picker_metrics import PickerMetrics
from picker.planner.autoscale_file import groups_of, read_autoscale_file
from picker.planner.load_window import LoadWindow
from picker.planner.shared_load import SharedLoad
from picker.planner.shell.autoscaling import Autoscaling
from picker.types import Candidate, Endpoint, EndpointMetrics, Usage
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi
from tests.support.picker.admin_scene import decision

SPEEDS = """slo: {ttftSeconds: 2, itlSeconds: 0.045}
capacity: {prefillTokensPerSecond: 8000, decodeBaseSeconds: 0.02, decodePerSequenceSeconds: 0.001}
intervalSeconds: 10
patienceIntervals: 3
groups:
"""
FILE = f"""{SPEEDS}
- {{deployment: workers, maxReplicas: 6, costPerReplicaHour: 2.5, %s}}
"""


@dataclass
class Scene:
    """A replica of a picker, with one of its pools, whose Deployment has the name `deployment`."""

    server: KubeApi
    file: str = FILE % ""
    pools: tuple[str, ...] = ("pool",)
    deployment: str = "workers"
    replica: str = "1"
    workers: list[Candidate] = field(default_factory=list)
    waiting: int = 0
    leads: bool = True
    num_peers: int | None = 0
    window: LoadWindow = field(init=False)
    metrics: PickerMetrics = field(default_factory=PickerMetrics)

    def __post_init__(self) -> None:
        self.shared = SharedLoad(self.replica)
        self.api = InProcessKubeApi(self.server, Random(1))

    def deploy(self, replicas: int) -> None:
        metadata = {"name": self.deployment, "namespace": "default"}
        head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
        self.server.write({**head, "spec": {"replicas": replicas}})

    def work(self, number: int, **metrics: Any) -> None:
        endpoint = Endpoint(f"w{number}", f"10.0.0.{number + 1}", 8000)
        found = Candidate(endpoint, EndpointMetrics(**metrics))
        self.workers = [one for one in self.workers if one.key != found.key] + [found]

    @property
    def replicas(self) -> int:
        found: int = self.server.read("deployments", self.deployment)["spec"]["replicas"]
        return found

    def series(self, name: str, **labels: str) -> float | None:
        name = f"pointsman_autoscale_{name}"
        labels |= {"group": self.deployment, "inference_pool": self.pools[0]}
        return self.metrics.registry.get_sample_value(name, labels)

    def load(self) -> None:
        pass

    @asynccontextmanager
    async def open(self) -> AsyncIterator[InProcessKubeApi]:
        yield self.api

    async def requests(self, each_second: int, seconds: int) -> None:
        asked = decision("a", 2000, 0)
        answered = replace(asked, endpoint_key="default/a", usage=Usage(2000, 300))
        for _ in range(seconds):
            for _ in range(each_second):
                self.window.decided(asked)
                self.window.finished(answered)
            await asyncio.sleep(1.0)

    @asynccontextmanager
    async def running(self, replicas: int = 0, workers: int = 0) -> AsyncIterator[None]:
        if replicas:
            self.deploy(replicas)
        for number in range(workers):
            self.work(number)
        sight = PoolSight(
            self.pools[0],
            self.pools,
            "default",
            lambda: self.workers,
            lambda: self.waiting,
            lambda: self.leads,
            lambda: self.num_peers,
            asyncio.get_running_loop().time,
        )
        groups = read_autoscale_file(self.file.encode(), "a.yaml")
        groups = groups_of(self.pools[0], self.pools, groups, "a.yaml")
        loop = Autoscaling(groups, sight, self, self.metrics.autoscale, self.shared)
        self.window = loop.watcher
        task = asyncio.create_task(loop.run())
        await asyncio.sleep(0.5)  # between its looks
        try:
            yield
        finally:
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])


def scene(more: str = "") -> Scene:
    return Scene(KubeApi(LoopClock()), FILE % more)
