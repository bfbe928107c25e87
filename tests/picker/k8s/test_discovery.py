"""A picker follows a pool of a cluster: its changes apply soon, and others do not."""

import asyncio
import logging
from typing import Any

import pytest

from picker.k8s.discovery import selected_pods
from tests.support.kube.followed_pool import APP, POOL, following, pool_object, ready
from tests.support.kube.pod_records import pod_document

MINUTE = 60.0


@pytest.mark.looptime
async def test_nothing_is_known_before_there_is_a_pool() -> None:
    async with following() as scene:
        scene.kubelet.run("a", "10.0.0.1", APP)
        await scene.settled()
        assert not scene.datastore.synced
        assert "there is no InferencePool default/pool" in str(scene.discovery.problem())
        scene.write_pool(APP)
        await scene.settled()
        assert scene.datastore.synced
        assert scene.names == {"a-rank-0"}
        assert scene.discovery.problem() is None


@pytest.mark.looptime
async def test_a_pool_without_pods_is_known_to_have_none() -> None:
    async with following() as scene:
        await ready(scene)
        assert scene.datastore.synced


@pytest.mark.looptime
async def test_pods_are_added_changed_and_removed() -> None:
    async with following() as scene:
        await ready(scene, "a", "b", "c", "d")
        scene.kubelet.move("a", "10.0.0.9")
        scene.kubelet.delete("b")
        scene.server.erase("pods", "c")
        other = scene.server.read("pods", "d")
        scene.server.write({**other, "metadata": {**other["metadata"], "labels": {}}})
        await scene.settled()
        (one,) = scene.datastore.snapshot().candidates
        assert one.endpoint.host_port == "10.0.0.9:8000"
        assert sorted(scene.forgotten.keys) == [f"default/{name}-rank-0" for name in "abcd"]


@pytest.mark.looptime
async def test_other_ports_are_other_endpoints() -> None:
    async with following() as scene:
        await ready(scene, "a")
        watches = [one for one in scene.api.requests if one.plural == "pods"]
        scene.write_pool(APP, 8000, 8001)
        await scene.settled()
        assert scene.names == {"a-rank-0", "a-rank-1"}
        assert [one for one in scene.api.requests if one.plural == "pods"] == watches
        assert scene.forgotten.keys == []


@pytest.mark.looptime
async def test_another_protocol_changes_no_endpoint() -> None:
    async with following() as scene:
        await ready(scene, "a")
        version, requests = scene.datastore.snapshot().version, len(scene.api.requests)
        scene.write_pool(APP, appProtocol="kubernetes.io/h2c")
        await scene.settled()
        assert scene.datastore.snapshot().version == version
        assert len(scene.api.requests) == requests


@pytest.mark.looptime
async def test_other_pods_are_swapped_in_when_they_are_known() -> None:
    async with following() as scene:
        await ready(scene, "a", "b")
        scene.kubelet.run("x", "10.0.0.8", {"app": "other"})
        slow = scene.server.faults.delay(5.0, "list", plural="pods")
        scene.write_pool({"app": "other"}, 9000)
        await asyncio.sleep(4.0)
        assert slow.met == 1
        assert scene.names == {"a-rank-0", "b-rank-0"}
        scene.kubelet.delete("a")
        await scene.settled()
        assert scene.names == {"b-rank-0"}
        await asyncio.sleep(1.5)
        (one,) = scene.datastore.snapshot().candidates
        assert one.endpoint.host_port == "10.0.0.8:9000"
        await scene.settled()
        assert len(scene.server.watches.of("pods")) == 1


@pytest.mark.looptime
async def test_a_second_change_of_selector_is_followed_to_its_end() -> None:
    async with following() as scene:
        await ready(scene, "a")
        scene.server.faults.delay(5.0, "list", plural="pods")
        scene.write_pool({"app": "other"})
        await scene.settled()
        scene.write_pool(APP, 8001)
        await asyncio.sleep(10)
        (one,) = scene.datastore.snapshot().candidates
        assert one.endpoint.host_port == "10.0.0.1:8001"


@pytest.mark.looptime
@pytest.mark.parametrize(
    "spec",
    [{"selector": {"matchLabels": {"bad key!": "x"}}, "targetPorts": [{"number": 8000}]}, {}],
)
async def test_an_invalid_pool_is_reported_and_ignored(
    spec: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with following() as scene:
        await ready(scene, "a")
        scene.server.write(pool_object(spec))
        await scene.settled()
        assert scene.names == {"a-rank-0"}
        assert "is not followed: spec" in str(scene.discovery.problem())
        warnings = [one for one in caplog.messages if "is not followed" in one]
        assert len(warnings) == 1
        assert scene.errors == 1
        scene.kubelet.run("b", "10.0.0.2", APP)
        await scene.settled()
        assert scene.names == {"a-rank-0", "b-rank-0"}
        scene.write_pool(APP, 9000)
        await scene.settled()
        assert {one.endpoint.port for one in scene.datastore.snapshot().candidates} == {9000}
        assert scene.discovery.problem() is None


@pytest.mark.looptime
async def test_a_pool_that_was_never_valid_is_waited_for() -> None:
    async with following() as scene:
        scene.server.write(pool_object({"targetPorts": []}))
        await scene.settled()
        assert not scene.datastore.synced
        assert "is not followed" in str(scene.discovery.problem())


@pytest.mark.looptime
@pytest.mark.parametrize("way", ["gone", "deleting", "invalid and deleting"])
async def test_a_deleted_pool_has_no_endpoints(way: str) -> None:
    async with following() as scene:
        await ready(scene, "a")
        scene.write_policy("InferenceObjective", "high", priority=3)
        await scene.settled()
        assert scene.priorities == {"high": 3}
        if way == "gone":
            scene.server.erase("inferencepools", POOL.name)
        else:
            found = scene.server.read("inferencepools", POOL.name)
            metadata = {**found["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            spec = {} if "invalid" in way else found["spec"]
            scene.server.write({**found, "metadata": metadata, "spec": spec})
        await scene.settled()
        assert scene.names == set()
        assert scene.priorities == {}
        assert not scene.datastore.synced
        if way != "gone":
            scene.server.erase("inferencepools", POOL.name)
        scene.write_pool(APP)
        await scene.settled()
        assert scene.names == {"a-rank-0"}
        assert scene.priorities == {"high": 3}


@pytest.mark.looptime
async def test_a_pool_replaced_at_once_remains_followed() -> None:
    async with following() as scene:
        await ready(scene, "a")
        await asyncio.sleep(1)
        scene.kubelet.run("b", "10.0.0.2", APP)
        await asyncio.sleep(0.004)
        scene.server.erase("inferencepools", POOL.name)
        await asyncio.sleep(0.006)
        scene.write_pool(APP, 8001)
        await scene.settled()
        found = {one.endpoint.host_port for one in scene.datastore.snapshot().candidates}
        assert found == {"10.0.0.1:8001", "10.0.0.2:8001"}


@pytest.mark.looptime
async def test_malformed_pods_are_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with following() as scene:
        await ready(scene, "a", "b")
        found = scene.server.read("pods", "a")
        scene.server.write({**found, "status": {**found["status"], "podIP": "nowhere"}})
        scene.kubelet.run("c", "neither", APP)
        scene.kubelet.run("d", "10.0.0.4", APP)
        await scene.settled()
        assert scene.pods == {"a", "b", "d"}
        assert len([one for one in caplog.messages if "is not followed" in one]) == 2


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("second", "names", "warnings"),
    [((8001,), {"a-rank-0", "b-rank-1"}, 0), ((8000,), {"b-rank-0", "b-rank-1"}, 1)],
)
async def test_pods_of_one_node_that_claim_one_port_are_warned_of_together(
    caplog: pytest.LogCaptureFixture, second: tuple[int, ...], names: set[str], warnings: int
) -> None:
    """Both Pods run on the host's network, where `a` declares 8000."""
    async with following() as scene:
        scene.write_pool(APP, 8000, 8001)
        for name, created, ports in (("a", "2026", (8000,)), ("b", "2027", second)):
            containers = {"server": {"ports": ports}}
            how = {"created": f"{created}-01-01T00:00:00Z", "containers": containers}
            pod = pod_document(name, "10.0.0.1", labels=APP, host_network=True, **how)
            for change in range(3):
                pod["metadata"]["annotations"]["change"] = str(change)
                scene.server.write(pod)
                await scene.settled()
        assert scene.names == names
        said = [one for one in caplog.messages if "both claim port 8000, 8001 of 10.0.0.1" in one]
        assert len([one for one in said if "default/a and default/b" in one]) == warnings


@pytest.mark.looptime
async def test_endpoints_survive_ten_minutes_without_an_api_server() -> None:
    async with following() as scene:
        await ready(scene, "a", "b", "c")
        scene.write_policy("InferenceObjective", "high", priority=3)
        await scene.settled()
        scene.api.go_away()
        scene.kubelet.delete("a")
        scene.server.erase("pods", "b")
        scene.kubelet.run("d", "10.0.0.4", APP)
        scene.kubelet.restart_container("c")
        scene.kubelet.set_ready("c", True)
        scene.write_policy("InferenceObjective", "high", priority=4)
        requests = len(scene.api.requests)
        for _ in range(10):
            await asyncio.sleep(MINUTE)
            assert scene.pods == {"a", "b", "c"}
            assert scene.priorities == {"high": 3}
            assert "the last known state is in use" in str(scene.discovery.problem())
        assert len(scene.api.requests) - requests < 20 * MINUTE
        scene.api.come_back(forget_changes=True)
        await scene.until(lambda: scene.pods == {"c", "d"}, 10)
        await asyncio.sleep(10)
        assert scene.priorities == {"high": 4}
        assert scene.discovery.problem() is None
        assert "default/c-rank-0" in scene.forgotten.keys


@pytest.mark.looptime
async def test_an_outage_that_begins_while_a_node_flickers_empties_nothing() -> None:
    async with following() as scene:
        await ready(scene, "a", "b")
        await asyncio.sleep(6)
        for name in "ab":
            scene.kubelet.set_ready(name, False)
        await scene.settled()
        scene.api.go_away()
        await asyncio.sleep(10 * MINUTE)
        assert scene.pods == {"a", "b"}
        scene.api.come_back()
        await asyncio.sleep(10)
        assert scene.pods == set()


@pytest.mark.looptime
async def test_pods_without_a_pool_are_followed_by_a_selector() -> None:
    selector = "app in (vllm,sglang),!canary"
    async with following(pods=selected_pods(selector, (8000, 8001))) as scene:
        scene.kubelet.run("a", "10.0.0.1", APP)
        scene.kubelet.run("b", "10.0.0.2", {"app": "sglang"})
        scene.kubelet.run("c", "10.0.0.3", APP | {"canary": "yes"})
        await scene.settled()
        assert scene.names == {"a-rank-0", "a-rank-1", "b-rank-0", "b-rank-1"}
        assert {one.plural for one in scene.api.requests} == {"pods"}
        assert scene.datastore.synced
        assert scene.discovery.problem() is None


@pytest.mark.looptime
async def test_a_storm_of_changes_is_applied_in_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with following() as scene:
        scene.write_pool(APP)
        for number in range(100):
            scene.kubelet.run(f"p{number}", f"10.0.1.{number}", APP, grace_seconds=600)
        await scene.settled()
        version, lines = scene.datastore.snapshot().version, len(caplog.messages)
        for number in range(1000):
            scene.kubelet.move(f"p{number % 100}", f"10.1.{number // 250}.{number % 250}")
            await asyncio.sleep(0.001)
        await scene.settled()
        steps = scene.datastore.snapshot().version - version
        assert 8 <= steps <= 15
        assert len(caplog.messages) - lines <= 5
        addresses = {one.endpoint.address for one in scene.datastore.snapshot().candidates}
        stored = scene.server.store.all(scene.server.resource("pods"))
        assert addresses == {one.obj["status"]["podIP"] for one in stored}
