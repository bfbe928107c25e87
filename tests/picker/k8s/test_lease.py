"""Replicas that hold a Lease at an API server with faults, in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from picker.k8s.elector import LeaseName, Timings
from picker.k8s.lease import Clocks, LeaseKeeper, record_of
from picker.metrics.picker_metrics import PickerMetrics
from tests.fakes.kube_api import statuses
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.faults import Fault
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi

LEASE = LeaseName("default", "epp-default-pool.llm-d.ai")
TIMINGS = Timings()
SOON = 0.1


@dataclass
class Replica:
    keeper: LeaseKeeper
    api: InProcessKubeApi
    metrics: PickerMetrics
    task: asyncio.Task[None]

    async def killed(self) -> None:
        self.api.away = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def counted(self, name: str, **labels: str) -> float | None:
        labels = {"lease": LEASE.name, **labels}
        return self.metrics.registry.get_sample_value(f"pointsman_{name}", labels)


@dataclass
class LeaseScene:
    server: KubeApi
    replicas: dict[str, Replica] = field(default_factory=dict)
    most: int = 0

    def start(self, name: str, token: str = "", timings: Timings = TIMINGS) -> Replica:
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
        found = [name for name, one in self.replicas.items() if one.keeper.is_leader()]
        self.most = max(self.most, len(found))
        return found

    @property
    def spec(self) -> dict[str, Any]:
        return self.server.read("leases", LEASE.name)["spec"]

    def write(self, spec: Any) -> None:
        metadata = {"name": LEASE.name, "namespace": LEASE.namespace}
        version = "coordination.k8s.io/v1"
        lease = {"apiVersion": version, "kind": "Lease", "metadata": metadata, "spec": spec}
        self.server.write(lease)

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not condition():
            assert loop.time() - began <= seconds, f"not within {seconds} s: {self.leaders}"
            await asyncio.sleep(0.01)
            _ = self.leaders
        return loop.time() - began

    async def watched(self, seconds: float) -> list[set[str]]:
        seen: list[set[str]] = []
        for _ in range(round(seconds / 0.05)):
            await asyncio.sleep(0.05)
            now = set(self.leaders)
            if seen[-1:] != [now]:
                seen.append(now)
        return seen


@asynccontextmanager
async def electing(*names: str) -> AsyncIterator[LeaseScene]:
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


pytestmark = pytest.mark.looptime
LEASE_SECONDS = TIMINGS.lease_seconds


async def test_one_replica_leads_and_remains_leader() -> None:
    async with electing("a", "b", "c") as scene:
        assert await scene.watched(120.0) == [{"a"}]
        spec = scene.spec
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 0)
        assert spec["leaseDurationSeconds"] == 15
        assert spec["renewTime"] > spec["acquireTime"]
        assert scene.replicas["b"].keeper.holder == "a"
        writes = [one for one in scene.replicas["b"].api.requests if one.verb != "get"]
        assert writes == []


async def test_a_killed_leader_is_succeeded_when_its_lease_ends() -> None:
    async with electing("a", "b") as scene:
        await asyncio.sleep(31.0)
        await scene.replicas["a"].killed()
        took = await scene.until(lambda: scene.leaders == ["b"], LEASE_SECONDS + 1.0)
        assert took > LEASE_SECONDS - TIMINGS.retry_seconds
        assert scene.spec["leaseTransitions"] == 1


@pytest.mark.parametrize("way", ["resign", "cancel"])
async def test_a_stopping_leader_releases_its_lease(way: str) -> None:
    async with electing("a", "b") as scene:
        await asyncio.sleep(5.3)
        one = scene.replicas["a"]
        if way == "resign":
            one.keeper.resign()
            assert not one.keeper.is_leader()
        else:
            one.task.cancel()
        await scene.until(lambda: scene.leaders == ["b"], TIMINGS.look_seconds + SOON)
        await asyncio.wait([one.task])
        assert scene.spec["leaseTransitions"] == 1
        assert one.keeper.is_leader() is False


async def test_a_leader_that_stops_during_a_renewal_releases_its_lease() -> None:
    async with electing("a") as scene:
        scene.server.faults.delay(0.5, "update")
        one = scene.replicas["a"]
        await scene.until(lambda: one.api.requests[-1].verb == "update", 3.0)
        await asyncio.sleep(0.2)
        one.keeper.resign()
        await asyncio.wait([one.task])
        assert scene.spec["holderIdentity"] == ""


async def test_leadership_ends_and_returns_with_the_server() -> None:
    async with electing("a", "b") as scene:
        await asyncio.sleep(10.0)
        for one in scene.replicas.values():
            one.api.go_away()
        assert scene.leaders == ["a"]
        await scene.until(lambda: not scene.leaders, TIMINGS.renew_seconds + SOON)
        problem = scene.replicas["a"].keeper.problem()
        assert "connection refused" in problem
        await asyncio.sleep(60.0)
        for one in scene.replicas.values():
            one.api.come_back()
        await scene.until(lambda: bool(scene.leaders), TIMINGS.retry_seconds + SOON)
        assert scene.replicas[scene.leaders[0]].keeper.problem() is None


async def test_a_leader_resigns_when_the_server_hangs() -> None:
    async with electing("a", "b") as scene:
        scene.server.faults.add(Fault(hangs=True))
        await scene.until(lambda: not scene.leaders, TIMINGS.renew_seconds + SOON)
        scene.server.faults.lift()
        await scene.until(lambda: bool(scene.leaders), LEASE_SECONDS)


async def test_a_write_by_another_client_is_no_loss() -> None:
    async with electing("a", "b") as scene:
        for _ in range(8):
            await asyncio.sleep(1.7)
            lease = scene.server.read("leases", LEASE.name)
            lease["metadata"] = {**lease["metadata"], "labels": {"touched": "yes"}}
            scene.server.write(lease, even_if_same=True)
        assert await scene.watched(30.0) == [{"a"}]
        assert scene.replicas["a"].counted("lease_errors_total", reason="409")


async def test_a_deleted_lease_is_made_again_by_its_holder() -> None:
    async with electing("a", "b") as scene:
        await asyncio.sleep(3.3)
        scene.server.erase("leases", LEASE.name)
        assert await scene.watched(30.0) == [{"a"}]
        assert scene.spec["holderIdentity"] == "a"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"holderIdentity": ""},
        {"holderIdentity": "", "leaseTransitions": 7, "leaseDurationSeconds": 1},
        {"holderIdentity": 5, "renewTime": 3, "acquireTime": [], "leaseTransitions": "x"},
        {"renewTime": "2026-01-01T00:00:00.000000Z"},
        {"holderIdentity": "gone", "renewTime": "2999-01-01T00:00:00.000000Z"},
    ],
)
async def test_any_lease_is_taken_in_the_end(spec: dict[str, Any]) -> None:
    async with electing() as scene:
        scene.write(spec)
        scene.start("a")
        is_free = not spec.get("holderIdentity", "") and not spec.get("renewTime")
        took = await scene.until(lambda: scene.leaders == ["a"], LEASE_SECONDS + 1.0)
        assert (took < 1.0) == is_free
        moves = spec.get("leaseTransitions", 0)
        assert scene.spec["leaseTransitions"] == (moves if isinstance(moves, int) else 0) + 1


async def test_missing_rights_name_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    async with electing() as scene:
        forbidden = statuses.ApiError(403, "Forbidden", "leases is forbidden")
        scene.server.faults.answer(forbidden, "create")
        one = scene.start("a")
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(20.0)
        messages = [record.message for record in caplog.records]
        assert len(messages) == 1
        problem = one.keeper.problem()
        for text in (LEASE.name, "get, update", "create", "coordination.k8s.io"):
            assert text in problem
        assert len(one.api.requests) < 60, "it is not asked all the time"
        scene.server.faults.lift()
        await scene.until(lambda: scene.leaders == ["a"], TIMINGS.retry_seconds + SOON)
        assert one.keeper.problem() is None


async def test_series_show_the_leader() -> None:
    async with electing("a", "b") as scene:
        await asyncio.sleep(9.0)
        a, b = scene.replicas["a"], scene.replicas["b"]
        assert (a.counted("leader"), b.counted("leader")) == (1.0, 0.0)
        assert (a.counted("lease_renewal_age_seconds") or 0.0) <= TIMINGS.retry_seconds + SOON
        assert a.counted("leader_changes_total", change="gained") == 1.0
        a.api.go_away()
        await scene.until(lambda: not scene.leaders, TIMINGS.renew_seconds + SOON)
        await asyncio.sleep(SOON)
        assert a.counted("leader_changes_total", change="lost") == 1.0
        assert (a.counted("lease_renewal_age_seconds") or 0.0) >= TIMINGS.renew_seconds


async def test_an_object_that_is_no_lease_reads_as_none() -> None:
    for document in ({}, {"spec": None, "metadata": 3}, {"spec": [1], "metadata": {}}):
        record = record_of(document)
        assert (record.holder, record.transitions, record.stated_seconds) == ("", 0, 0.0)
    bad = {"spec": {"holderIdentity": "x", "leaseTransitions": True, "leaseDurationSeconds": -3}}
    assert record_of(bad).transitions == 0
    assert record_of(bad).stated_seconds == 0.0
