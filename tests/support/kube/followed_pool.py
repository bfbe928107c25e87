"""A pool that a picker follows in a fake cluster, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from picker.k8s.api import POOLS
from picker.k8s.discovery import KubernetesDiscovery, WatchedPool
from picker.k8s.objects import PoolName
from picker.k8s.pool_view import PoolShape
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RequestRules
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi
from tests.support.kube.kubernetes_objects import CRDS

APP = {"app": "vllm"}
SOON_SECONDS = 0.1  # by then what was written is applied
POOL = PoolName("pool", "default", POOLS.group)


@dataclass
class Forgotten:
    keys: list[str] = field(default_factory=list)

    def endpoint_removed(self, key: str) -> None:
        self.keys.append(key)


@dataclass
class FollowedPool:
    server: KubeApi
    api: InProcessKubeApi
    kubelet: Kubelet
    datastore: Datastore
    rules: RequestRules
    forgotten: Forgotten
    metrics: PickerMetrics
    discovery: KubernetesDiscovery

    @property
    def names(self) -> set[str]:
        return {one.endpoint.name for one in self.datastore.snapshot().candidates}

    @property
    def pods(self) -> set[str]:
        return {name.rpartition("-rank-")[0] for name in self.names}

    @property
    def priorities(self) -> dict[str, int | None]:
        return {one.name: one.priority for one in self.rules.current.objectives}

    @property
    def errors(self) -> float:
        return self.metrics.registry.get_sample_value("pointsman_discovery_errors_total") or 0.0

    def write_pool(self, labels: Mapping[str, str], *ports: int, **spec: Any) -> None:
        targets = [{"number": port} for port in ports or (8000,)]
        given = {"selector": {"matchLabels": dict(labels)}, "targetPorts": targets} | spec
        self.server.write(pool_object(given))

    def write_policy(self, kind: str, name: str, **spec: Any) -> None:
        given = {"poolRef": {"name": POOL.name}} | spec
        version = spec.pop("version", "llm-d.ai/v1alpha2")
        given.pop("version", None)
        metadata = {"name": name, "namespace": "default"}
        self.server.write(
            {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": given}
        )

    async def settled(self) -> None:
        await asyncio.sleep(SOON_SECONDS)

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.01)


def pool_object(spec: Mapping[str, Any], **metadata: Any) -> Object:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": POOL.name, "namespace": "default"} | metadata,
        "spec": dict(spec),
    }


def new_server(*, with_definitions: bool = True) -> KubeApi:
    server = KubeApi(LoopClock())
    if with_definitions:
        server.install(*sorted(CRDS.glob("*.yaml")))
    return server


@asynccontextmanager
async def following(
    server: KubeApi | None = None, pods: PoolShape | None = None
) -> AsyncIterator[FollowedPool]:
    server = server or new_server()
    api = InProcessKubeApi(server, Random(1))
    forgotten, metrics = Forgotten(), PickerMetrics()
    datastore, rules = Datastore((forgotten,)), RequestRules()

    @asynccontextmanager
    async def connect() -> AsyncIterator[InProcessKubeApi]:
        yield api

    clock = asyncio.get_running_loop().time
    target = WatchedPool(POOL, pods)
    discovery = KubernetesDiscovery(target, connect, datastore, rules, metrics, clock=clock)
    discovery.load()
    task = asyncio.create_task(discovery.run())
    scene = FollowedPool(
        server, api, Kubelet(server), datastore, rules, forgotten, metrics, discovery
    )
    try:
        yield scene
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def following_pods(*names: str, server: KubeApi | None = None) -> AsyncIterator[FollowedPool]:
    """Follow a pool of these ready Pods, which are endpoints already."""
    async with following(server) as scene:
        scene.write_pool(APP)
        for number, name in enumerate(names, 1):
            scene.kubelet.run(name, f"10.0.0.{number}", APP)
        await scene.settled()
        assert scene.pods == set(names)
        yield scene
