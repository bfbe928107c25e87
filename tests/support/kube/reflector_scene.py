"""A reflector of ConfigMaps over the fake API server's parts, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from base.series import AnySeries
from picker.k8s.api import ApiResource, Selection
from picker.k8s.object_map import ObjectKey
from picker.k8s.reflector import Reflector, Subject
from picker.metrics.picker_metrics import KubernetesSeries
from tests.fakes.kube_api.clock import LoopClock
from tests.fakes.kube_api.server import KubeApi
from tests.support.kube.in_process_kube_api import InProcessKubeApi

CONFIGS = ApiResource("", "v1", "configmaps")
SELECTION = Selection("default", "app=x")
EPOCH = 1_800_000_000.0


def config(name: str, value: Any = "1", app: str = "x", uid: str = "") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "labels": {"app": app}}
    if uid:
        metadata["uid"] = uid
    data = {"value": value}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class _Config(msgspec.Struct):
    data: dict[str, str]


def decode(raw: msgspec.Raw) -> str | None:
    return msgspec.json.decode(raw, type=_Config).data["value"]


@dataclass(slots=True)
class Scene:
    server: KubeApi
    api: InProcessKubeApi
    reflector: Reflector[str]
    declared: list[AnySeries]
    published: list[Mapping[ObjectKey, str]] = field(default_factory=list)
    pulse: asyncio.Event = field(default_factory=asyncio.Event)

    def seen(self, view: Mapping[ObjectKey, str], changed: Collection[ObjectKey]) -> None:
        """Check that a view differs from the last one only in the reported keys."""
        before: Mapping[ObjectKey, str] = self.published[-1] if self.published else {}
        assert {key for key in before.keys() | view.keys() if before.get(key) != view.get(key)} <= {
            *changed
        }
        self.published.append(view)
        self.pulse.set()

    @property
    def shown(self) -> dict[str, str]:
        return {name: value for (_, name), value in self.reflector.view.items()}

    @property
    def there(self) -> dict[str, str]:
        stored = self.server.store.all(self.server.resource("configmaps"))
        objs = [one.obj for one in stored]
        return {
            obj["metadata"]["name"]: obj["data"]["value"]
            for obj in objs
            if obj["metadata"]["labels"]["app"] == "x"
        }

    def write(self, name: str, value: Any = "1", app: str = "x", uid: str = "") -> None:
        self.server.write(config(name, value, app, uid))

    def erase(self, name: str) -> None:
        self.server.erase("configmaps", name)

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not condition():
            assert loop.time() - began <= seconds, f"not within {seconds} s: {self.shown}"
            await asyncio.sleep(max(0.05, seconds / 500))
        return loop.time() - began

    async def equal(self, seconds: float = 1.0) -> float:
        return await self.until(lambda: self.shown == self.there, seconds)

    def asked(self, *verbs: str) -> int:
        return sum(1 for one in self.api.requests if not verbs or one.verb in verbs)

    def counted(self, name: str, *labels: str) -> float:
        one = next(s for s in self.declared if s.declaration.name == f"pointsman_kubernetes_{name}")
        wanted = ("configmaps", "default", *labels)
        return sum(number for values, number in one.numbers() if values == wanted)  # type: ignore[misc]


@asynccontextmanager
async def following(
    *names: str, window: int = 1000, seed: int = 1, token: str = "", first_seconds: float = 1.0
) -> AsyncIterator[Scene]:
    server = KubeApi(LoopClock(EPOCH), window=window)
    for name in names:
        server.write(config(name))
    api = InProcessKubeApi(server, Random(seed), token)
    declared: list[AnySeries] = []
    reflector = Reflector(
        api,
        Subject(CONFIGS, SELECTION, decode),
        rng=Random(seed + 1),
        clock=asyncio.get_running_loop().time,
        series=KubernetesSeries(declared),
    )
    scene = Scene(server, api, reflector, declared)
    reflector.subscribe(scene.seen)
    running = asyncio.create_task(reflector.run())
    try:
        await asyncio.sleep(first_seconds)
        yield scene
        assert not running.done(), "the reflector ended by itself"
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
