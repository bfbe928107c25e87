"""A picker follows a pool of a cluster with its Pods, objectives and rewrites."""

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from picker.k8s.api import ApiResource, KubernetesApi
from picker.k8s.discovery import OBJECTIVE_KIND, KindFollower, selected_pods
from picker.k8s.reflector import Reflector
from tests.fakes.kube_api.statuses import ApiError
from tests.support.kube.followed_pool import (
    APP,
    POOL,
    following,
    following_pods,
    new_server,
    pool_object,
)
from tests.support.kube.kubernetes_objects import CRDS
from tests.support.kube.pod_records import pod_document

MINUTE = 60.0
pytestmark = pytest.mark.looptime


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


async def test_a_pool_without_pods_is_known_to_have_none() -> None:
    async with following_pods() as scene:
        assert scene.datastore.synced


async def test_pods_are_added_changed_and_removed() -> None:
    async with following_pods("a", "b", "c", "d") as scene:
        scene.kubelet.move("a", "10.0.0.9")
        scene.kubelet.delete("b")
        scene.server.erase("pods", "c")
        other = scene.server.read("pods", "d")
        scene.server.write({**other, "metadata": {**other["metadata"], "labels": {}}})
        await scene.settled()
        (one,) = scene.datastore.snapshot().candidates
        assert one.endpoint.host_port == "10.0.0.9:8000"
        assert sorted(scene.forgotten.keys) == [f"default/{name}-rank-0" for name in "abcd"]


async def test_other_ports_are_other_endpoints() -> None:
    async with following_pods("a") as scene:
        watches = [one for one in scene.api.requests if one.plural == "pods"]
        scene.write_pool(APP, 8000, 8001)
        await scene.settled()
        assert scene.names == {"a-rank-0", "a-rank-1"}
        assert [one for one in scene.api.requests if one.plural == "pods"] == watches
        assert scene.forgotten.keys == []


async def test_another_protocol_changes_no_endpoint() -> None:
    async with following_pods("a") as scene:
        version, requests = scene.datastore.snapshot().version, len(scene.api.requests)
        scene.write_pool(APP, appProtocol="kubernetes.io/h2c")
        await scene.settled()
        assert scene.datastore.snapshot().version == version
        assert len(scene.api.requests) == requests


async def test_other_pods_are_swapped_in_when_they_are_known() -> None:
    async with following_pods("a", "b") as scene:
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


async def test_a_second_change_of_selector_is_followed_to_its_end() -> None:
    async with following_pods("a") as scene:
        scene.server.faults.delay(5.0, "list", plural="pods")
        scene.write_pool({"app": "other"})
        await scene.settled()
        scene.write_pool(APP, 8001)
        await asyncio.sleep(10)
        (one,) = scene.datastore.snapshot().candidates
        assert one.endpoint.host_port == "10.0.0.1:8001"


@pytest.mark.parametrize(
    "spec",
    [{"selector": {"matchLabels": {"bad key!": "x"}}, "targetPorts": [{"number": 8000}]}, {}],
)
async def test_an_invalid_pool_is_reported_and_ignored(
    spec: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with following_pods("a") as scene:
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


async def test_a_pool_that_was_never_valid_is_waited_for() -> None:
    async with following() as scene:
        scene.server.write(pool_object({"targetPorts": []}))
        await scene.settled()
        assert not scene.datastore.synced
        assert "is not followed" in str(scene.discovery.problem())


@pytest.mark.parametrize("way", ["gone", "deleting", "invalid and deleting"])
async def test_a_deleted_pool_has_no_endpoints(way: str) -> None:
    async with following_pods("a") as scene:
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


async def test_a_pool_replaced_at_once_remains_followed() -> None:
    async with following_pods("a") as scene:
        await asyncio.sleep(1)
        scene.kubelet.run("b", "10.0.0.2", APP)
        await asyncio.sleep(0.004)
        scene.server.erase("inferencepools", POOL.name)
        await asyncio.sleep(0.006)
        scene.write_pool(APP, 8001)
        await scene.settled()
        found = {one.endpoint.host_port for one in scene.datastore.snapshot().candidates}
        assert found == {"10.0.0.1:8001", "10.0.0.2:8001"}


async def test_malformed_pods_are_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with following_pods("a", "b") as scene:
        found = scene.server.read("pods", "a")
        scene.server.write({**found, "status": {**found["status"], "podIP": "nowhere"}})
        scene.kubelet.run("c", "neither", APP)
        scene.kubelet.run("d", "10.0.0.4", APP)
        await scene.settled()
        assert scene.pods == {"a", "b", "d"}
        assert len([one for one in caplog.messages if "is not followed" in one]) == 2


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


async def test_endpoints_survive_ten_minutes_without_an_api_server() -> None:
    async with following_pods("a", "b", "c") as scene:
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


async def test_an_outage_that_begins_while_a_node_flickers_empties_nothing() -> None:
    async with following_pods("a", "b") as scene:
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


LEGACY = "inference.networking.x-k8s.io/v1alpha2"


async def test_objectives_and_rewrites_of_the_pool_count() -> None:
    async with following_pods("a") as scene:
        scene.write_policy("InferenceObjective", "mine", priority=2)
        scene.write_policy("InferenceObjective", "others", poolRef={"name": "x"}, priority=2)
        elsewhere = {"name": POOL.name, "group": "inference.networking.x-k8s.io"}
        scene.write_policy("InferenceObjective", "elsewhere", poolRef=elsewhere, priority=2)
        rules = [{"targets": [{"modelRewrite": "m"}]}]
        scene.write_policy("InferenceModelRewrite", "r", rules=rules)
        await scene.settled()
        assert scene.priorities == {"mine": 2}
        assert [one.name for one in scene.rules.current.rewrites] == ["r"]
        scene.write_policy("InferenceObjective", "mine", priority=-1)
        await scene.settled()
        assert scene.priorities == {"mine": -1}
        scene.write_policy("InferenceObjective", "mine", poolRef={"name": "x"})
        scene.server.erase("inferencemodelrewrites", "r")
        await scene.settled()
        assert scene.rules.current.objectives == scene.rules.current.rewrites == ()


async def test_definitions_may_be_installed_later(caplog: pytest.LogCaptureFixture) -> None:
    server = new_server(with_definitions=False)
    pools, objectives = sorted(CRDS.glob("*pools.yaml")), sorted(CRDS.glob("*objectives.yaml"))
    async with following(server) as scene:
        scene.kubelet.run("a", "10.0.0.1", APP)
        await asyncio.sleep(2)
        assert not scene.datastore.synced
        assert "install its CustomResourceDefinition" in str(scene.discovery.problem())
        server.install(*pools)
        scene.write_pool(APP)
        await asyncio.sleep(MINUTE)
        assert scene.pods == {"a"}
        assert scene.discovery.problem() is None
        server.install(*objectives)
        scene.write_policy("InferenceObjective", "high", priority=3)
        await asyncio.sleep(MINUTE)
        assert scene.priorities == {"high": 3}
        server.remove("inferenceobjectives")
        await asyncio.sleep(2 * MINUTE)
        assert scene.priorities == {}
        assert scene.pods == {"a"}
    assert any("no inferencemodelrewrites" in one for one in caplog.messages)


async def test_a_server_without_any_known_kind_removes_no_rules() -> None:
    """Something in front of the API server answers, however long it does so."""
    async with following_pods("a") as scene:
        scene.write_policy("InferenceObjective", "high", priority=3)
        await scene.settled()

        async def none(_: ApiResource) -> bool:
            return False

        known, scene.api.has = scene.api.has, none  # type: ignore[method-assign]
        await asyncio.sleep(10 * MINUTE)
        assert scene.priorities == {"high": 3}
        scene.api.has = known  # type: ignore[method-assign]
        await asyncio.sleep(MINUTE)
        assert scene.priorities == {"high": 3}


async def test_the_current_group_is_preferred_to_the_deprecated_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = new_server(with_definitions=False)
    server.install(*sorted(CRDS.glob("*pools.yaml")), legacy(CRDS))
    async with following_pods("a", server=server) as scene:
        scene.write_policy("InferenceObjective", "old", priority=1, version=LEGACY)
        await scene.settled()
        assert scene.priorities == {"old": 1}
        assert any("deprecated" in one for one in caplog.messages)
        server.install(*sorted(CRDS.glob("*objectives.yaml")))
        scene.write_policy("InferenceObjective", "new", priority=2)
        await asyncio.sleep(MINUTE)
        assert scene.priorities == {"new": 2}


def legacy(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*inferenceobjectives.yaml")
    definition: dict[str, Any] = yaml.safe_load(path.read_text())
    definition["metadata"]["name"] = "inferenceobjectives.inference.networking.x-k8s.io"
    definition["spec"]["group"] = "inference.networking.x-k8s.io"
    return definition


async def test_forbidden_objectives_do_not_stop_requests() -> None:
    server = new_server()
    refused = ApiError(403, "Forbidden", "no role")
    server.faults.answer(refused, "list", plural="inferenceobjectives")
    async with following(server) as scene:
        scene.write_pool(APP)
        scene.kubelet.run("a", "10.0.0.1", APP)
        await asyncio.sleep(2)
        assert not scene.datastore.synced
        await asyncio.sleep(5)
        assert scene.pods == {"a"}
        assert "grant the verbs list and watch" in str(scene.discovery.problem())


async def test_rules_are_loaded_before_the_first_endpoint() -> None:
    server = new_server()
    server.faults.delay(3.0, "list", plural="inferenceobjectives")
    async with following(server) as scene:
        scene.write_pool(APP)
        scene.kubelet.run("a", "10.0.0.1", APP)
        scene.write_policy("InferenceObjective", "high", priority=3)
        await scene.until(lambda: scene.datastore.synced, 4)
        assert scene.priorities == {"high": 3}


# The end of following


class SlowToEnd:
    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()

    def subscribe(self, listener: Any) -> None: ...

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()


class Discovery:
    def __init__(self) -> None:
        self.kinds = {OBJECTIVE_KIND.legacy}

    async def has(self, resource: ApiResource) -> bool:
        return resource in self.kinds


async def test_the_reader_stops_during_a_change_of_groups() -> None:
    api, slow = Discovery(), SlowToEnd()
    follower = KindFollower(
        OBJECTIVE_KIND, lambda _: cast("Reflector[int]", slow), lambda records: None
    )
    task = asyncio.create_task(follower.run(cast("KubernetesApi", api)))
    await asyncio.sleep(1)
    api.kinds.add(OBJECTIVE_KIND.current)
    await slow.ending.wait()
    task.cancel()
    await asyncio.sleep(0)
    slow.may_end.set()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
