"""The autoscaling loop with an API server in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.app.shelves import PoolSight
from picker.cli.options import KubernetesFlags
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics
from picker.planner.autoscale_file import read_autoscale_file
from picker.planner.load_window import LoadWindow
from picker.planner.shell.autoscaling import Autoscaling, access_for, read_groups
from picker.planner.shell.scale import DeploymentScale, ScaleError
from picker.types import Candidate, Endpoint, EndpointMetrics, ServedTotals, Usage
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi
from tests.support.picker.admin_scene import decision

pytestmark = pytest.mark.looptime
FILE = """slo: {ttftSeconds: 2, itlSeconds: 0.045}
capacity: {prefillTokensPerSecond: 8000, decodeBaseSeconds: 0.02, decodePerSequenceSeconds: 0.001}
intervalSeconds: 10
patienceIntervals: 3
groups:
- {deployment: workers, maxReplicas: 6, costPerReplicaHour: 2.5, %s}
"""
LABELS = {"group": "workers", "inference_pool": "pool"}


@dataclass
class Scene:
    server: KubeApi
    more: str = ""
    workers: list[Candidate] = field(default_factory=list)
    waiting: int = 0
    leads: bool = True
    window: LoadWindow = field(init=False)
    metrics: PickerMetrics = field(default_factory=PickerMetrics)

    def __post_init__(self) -> None:
        self.api = InProcessKubeApi(self.server, Random(1))

    def deploy(self, replicas: int) -> None:
        metadata = {"name": "workers", "namespace": "default"}
        head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
        self.server.write({**head, "spec": {"replicas": replicas}})

    def work(self, number: int, **metrics: Any) -> None:
        endpoint = Endpoint(f"w{number}", f"10.0.0.{number + 1}", 8000)
        found = Candidate(endpoint, EndpointMetrics(**metrics))
        self.workers = [one for one in self.workers if one.key != found.key] + [found]

    @property
    def replicas(self) -> int:
        found: int = self.server.read("deployments", "workers")["spec"]["replicas"]
        return found

    def series(self, name: str, **labels: str) -> float | None:
        name = f"pointsman_autoscale_{name}"
        return self.metrics.registry.get_sample_value(name, LABELS | labels)

    def load(self) -> None:
        pass

    @asynccontextmanager
    async def open(self) -> AsyncIterator[InProcessKubeApi]:
        yield self.api

    async def requests(self, each_second: int, seconds: int) -> None:
        for _ in range(seconds):
            for _ in range(each_second):
                asked, usage = decision("a", 2000, 0), Usage(2000, 300)
                self.window.decided(asked)
                self.window.finished(replace(asked, endpoint_key="default/a", usage=usage))
            await asyncio.sleep(1.0)

    @asynccontextmanager
    async def running(self, replicas: int = 0, workers: int = 0) -> AsyncIterator[None]:
        if replicas:
            self.deploy(replicas)
        for number in range(workers):
            self.work(number)
        sight = PoolSight(
            "pool",
            "default",
            lambda: self.workers,
            lambda: self.waiting,
            lambda: self.leads,
            asyncio.get_running_loop().time,
        )
        groups = read_autoscale_file((FILE % self.more).encode(), "a.yaml")
        loop = Autoscaling(groups, sight, self, self.metrics.autoscale)
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
    return Scene(KubeApi(LoopClock()), more)


async def test_a_load_scales_the_deployment_up_and_back() -> None:
    pool = scene()
    async with pool.running(replicas=1, workers=1):
        await pool.requests(3, 10)
        most = pool.replicas
        assert most > 2
        assert pool.series("wanted_replicas") == most
        assert pool.series("wanted_cost_per_hour") == 2.5 * most
        await pool.requests(0, 20)
        assert pool.replicas == most
        await pool.requests(0, 20)
        assert pool.replicas == 1
        assert pool.series("current_replicas") == 1


async def test_a_standby_writes_and_reports_nothing() -> None:
    """It receives no requests, and would remove the workers."""
    pool = scene()
    async with pool.running(replicas=4):
        pool.leads = False
        await pool.requests(0, 60)
        assert pool.replicas == 4
        assert pool.series("wanted_replicas") is None
        assert pool.api.requests == []


async def test_the_first_request_wakes_a_group_without_workers() -> None:
    pool = scene("minReplicas: 0")
    async with pool.running(replicas=1, workers=1):
        await pool.requests(0, 31)
        assert pool.replicas == 0
        pool.workers = []
        pool.waiting = 1
        await asyncio.sleep(2.0)
        assert pool.replicas == 1


async def test_a_worker_without_metrics_does_not_count_as_idle() -> None:
    pool = scene("minReplicas: 0")
    pool.work(0, running_requests=None)
    async with pool.running(replicas=1):
        await pool.requests(0, 31)
        assert pool.replicas == 1


async def test_slow_workers_are_detected_by_their_metrics() -> None:
    fast, slow = scene(), scene()
    async with fast.running(replicas=4), slow.running(replicas=4):
        for second in range(100):
            for pool, running in ((fast, 8), (slow, 16)):
                for number in range(4):
                    totals = ServedTotals(float(second), 285.0 * second)
                    pool.work(number, running_requests=running, served=totals)
                for _ in range(4):
                    pool.window.decided(decision("a", 200, 0))
            await asyncio.sleep(1.0)
        assert (slow.series("wanted_replicas") or 0) > (fast.series("wanted_replicas") or 0)


async def test_a_missing_deployment_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = scene()
    with caplog.at_level(logging.WARNING):
        async with pool.running(workers=1):
            await pool.requests(3, 30)
            assert pool.series("writes_total", result="404") == 3
            assert (pool.series("wanted_replicas") or 0) > 2
            pool.deploy(1)
            await pool.requests(3, 10)
            assert pool.replicas > 2
    said = [one for one in caplog.messages if "there is no deployment default/workers" in one]
    assert len(said) == 1


async def test_a_denied_write_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deny(*_: object) -> None:
        raise ScaleError("may not write", "403")

    pool = scene()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(DeploymentScale, "write", deny)
        async with pool.running(replicas=1, workers=1):
            await pool.requests(3, 30)
            assert (pool.series("writes_total", result="403") or 0) > 1
    assert caplog.messages.count("may not write") == 1


async def test_the_loop_survives_an_unreachable_server(caplog: pytest.LogCaptureFixture) -> None:
    pool = scene()
    async with pool.running(replicas=1):
        pool.api.go_away()
        await pool.requests(3, 20)
        assert pool.replicas == 1
        pool.api.come_back()
        await pool.requests(3, 10)
        assert pool.replicas > 2


def test_a_deployment_needs_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILE % "minReplicas: 1")
    groups = read_groups(path)
    with pytest.raises(ConfigError, match="deployment workers is in a cluster"):
        access_for(groups, None, path)
    assert access_for(groups, KubernetesFlags("pool"), path) is not None
    path.write_text("mode: thresholds\ngroups: [{}]")
    assert access_for(read_groups(path), None, path) is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--autoscale .*none\.yaml: No such file"):
        read_groups(tmp_path / "none.yaml")
