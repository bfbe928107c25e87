"""The autoscaling loop with an API server in virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from picker.cli.options import KubernetesFlags
from picker.errors import ConfigError
from picker.framework.attributes import EndpointLoad
from picker.metrics.picker_metrics import PickerMetrics
from picker.planner.shell.autoscaling import access_for, read_groups
from picker.planner.shell.scale import DeploymentScale, ScaleError
from picker.types import ServedTotals
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.server import KubeApi
from tests.support.picker.admin_scene import decision
from tests.support.picker.autoscale_scene import FILE, SPEEDS, Scene, scene

pytestmark = pytest.mark.looptime


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


async def test_each_pool_is_scaled_by_its_own_load() -> None:
    server, metrics = KubeApi(LoopClock()), PickerMetrics()
    file = f"{SPEEDS}- {{pool: a, deployment: of-a}}\n- {{pool: b, deployment: of-b}}\n"
    a, b = (
        Scene(server, file, pools, f"of-{pools[0]}", metrics=metrics)
        for pools in (("a", "b"), ("b", "a"))
    )
    async with a.running(replicas=1, workers=1), b.running(replicas=2, workers=2):
        await asyncio.gather(a.requests(3, 30), b.requests(1, 30))
        assert a.replicas == a.series("wanted_replicas") == a.series("current_replicas") == 4
        assert b.replicas == b.series("wanted_replicas") == 2


@dataclass
class Fleet:
    """Replicas of a picker that scale one Deployment, and what its scale was."""

    replicas: list[Scene]
    scales: list[int] = field(default_factory=list)
    is_cut: bool = False  # no replica hears another one
    _stacks: list[AsyncExitStack] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            self.replicas[0].deploy(2)
            for one in self.replicas:
                of_one = await stack.enter_async_context(AsyncExitStack())
                await of_one.enter_async_context(one.running(workers=2))
                self._stacks.append(of_one)
            exchange = asyncio.create_task(self._exchange())
            stack.callback(exchange.cancel)
            # A second after a plan of the first one; all have heard one another.
            await asyncio.sleep(11.0 - 0.5 * len(self.replicas))
            yield
            assert not exchange.done()

    async def stop_first(self) -> None:
        await self._stacks.pop(0).aclose()
        self.replicas.pop(0)

    async def _exchange(self) -> None:
        while True:
            for here in self.replicas:
                loads: dict[str, EndpointLoad] = {}
                for there in self.replicas:
                    if there is not here and not self.is_cut:
                        loads.update(there.shared.own_loads)
                here.shared.set_loads_elsewhere(loads)
                here.num_peers = None if self.is_cut else len(self.replicas) - 1
            self.scales.append(self.replicas[0].replicas)
            await asyncio.sleep(0.5)

    async def requests(self, shares: Sequence[int], intervals: int) -> None:
        """Send requests, but none near a plan, when reports may be under way."""
        for _ in range(intervals):
            pairs = zip(self.replicas, shares, strict=True)
            await asyncio.gather(*(one.requests(share, 7) for one, share in pairs))
            await asyncio.sleep(3.0)

    @property
    def changes(self) -> list[int]:
        return [replicas for replicas, _ in groupby(self.scales)]


def fleet(*names: str) -> Fleet:
    server, file = KubeApi(LoopClock()), f"{SPEEDS}- {{deployment: workers, maxReplicas: 40}}\n"
    return Fleet([Scene(server, file, replica=name) for name in names])


async def scales_of_one_picker(*rates: int) -> list[int]:
    """Return the changes of the scale with a picker that receives all requests."""
    alone = fleet("1")
    async with alone.running():
        for rate in rates:
            await alone.requests([rate], 8)
    return alone.changes


async def test_replicas_plan_as_one_picker_that_receives_all_requests() -> None:
    expected, both = await scales_of_one_picker(10, 20, 10), fleet("1", "2")
    async with both.running():
        for shares in ((7, 3), (14, 6), (7, 3)):
            await both.requests(shares, 8)
        assert both.changes == expected
        assert max(expected) == 2 * expected[-1] > 10
        first, second = both.replicas
        assert first.series("wanted_replicas") == expected[-1]
        assert second.series("wanted_replicas") is None
        assert {one.verb for one in second.api.requests} == {"get"}


async def test_the_next_replica_continues_where_the_first_one_has_left() -> None:
    expected, both = await scales_of_one_picker(10, 10, 20), fleet("1", "2")
    async with both.running():
        await both.requests((7, 3), 8)
        await both.stop_first()
        await both.requests((10,), 8)
        await both.requests((20,), 8)
        assert both.changes == expected
        assert both.replicas[0].series("wanted_replicas") == expected[-1]


async def test_replicas_that_do_not_reach_one_another_remove_no_worker() -> None:
    both = fleet("1", "2")
    async with both.running():
        await both.requests((7, 3), 8)
        before = both.changes
        for is_cut in (True, False):
            both.is_cut = is_cut
            await both.requests((7, 3), 8)
            assert both.changes == before
        await both.requests((1, 1), 8)
        assert both.changes[-1] < before[-1]
    strangers = fleet("1", "2")
    strangers.is_cut = True
    async with strangers.running():
        await strangers.requests((7, 3), 8)
        assert len(strangers.changes) > 1
        assert strangers.changes == sorted(strangers.changes)


async def test_the_second_replica_wakes_a_group_without_workers() -> None:
    both = fleet("1", "2")
    for one in both.replicas:
        one.file = FILE % "minReplicas: 0"
    async with both.running():
        await asyncio.sleep(40.0)
        assert both.changes[-1] == 0
        both.replicas[1].waiting = 1
        await asyncio.sleep(4.0)
        assert both.changes[-1] == 1
