"""Objectives and rewrites of a cluster, in whichever group it has them, if it has any."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from picker.k8s.api import ApiResource, KubernetesApi
from picker.k8s.discovery import OBJECTIVE_KIND, KindFollower
from picker.k8s.reflector import Reflector
from tests.fakes.kube_api.statuses import ApiError
from tests.support.kube.followed_pool import APP, POOL, following, new_server, ready
from tests.support.kube.kubernetes_objects import CRDS

LEGACY = "inference.networking.x-k8s.io/v1alpha2"
MINUTE = 60.0


@pytest.mark.looptime
async def test_objectives_and_rewrites_of_the_pool_count() -> None:
    async with following() as scene:
        await ready(scene, "a")
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


@pytest.mark.looptime
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


@pytest.mark.looptime
async def test_a_server_without_any_known_kind_removes_no_rules() -> None:
    """Something in front of the API server answers, however long it does so."""
    async with following() as scene:
        await ready(scene, "a")
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


@pytest.mark.looptime
async def test_the_current_group_is_preferred_to_the_deprecated_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = new_server(with_definitions=False)
    server.install(*sorted(CRDS.glob("*pools.yaml")), legacy(CRDS))
    async with following(server) as scene:
        await ready(scene, "a")
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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


@pytest.mark.looptime
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
