"""A whole picker that follows a cluster over real sockets, with requests that never fail."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picker.cli.options import KubernetesFlags
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.picker.steady_requests import Traffic
from tests.support.picker.whole_picker import FOUR_SCORERS, WholePicker, whole_picker
from tests.support.waiting import until

APP = {"app": "vllm"}
POOL = "inferencepools"


@dataclass
class Scene:
    api: KubeApi
    kubelet: Kubelet
    picker: WholePicker
    traffic: Traffic

    async def serves(self, *places: str) -> None:
        async def are_known() -> bool:
            known = await self.picker.endpoints()
            return {row["address"] for row in known.values()} == set(places)

        await until(are_known)
        await self.traffic.only_at(places)

    def write_pool(self, labels: Mapping[str, str], *ports: int) -> None:
        targets = [{"number": port} for port in ports]
        selector = {"matchLabels": dict(labels)}
        self.api.write(pool(name="pool", selector=selector, targetPorts=targets))


def options_for(api: KubeApi, folder: Path, **changes: Any) -> dict[str, Any]:
    kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
    flags = KubernetesFlags("pool", kubeconfig=kubeconfig)
    return {"endpoints_file": None, "kubernetes": flags, "pool_name": "pool"} | changes


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Scene]:
    async with running_kube_api(None, *sorted(CRDS.glob("*.yaml"))) as api:
        kubelet = Kubelet(api)
        kubelet.run("a", "127.0.0.11", APP, grace_seconds=600)
        kubelet.run("b", "127.0.0.12", APP, grace_seconds=600)
        api.write(pool(name="pool"))
        options = options_for(api, folder)
        async with whole_picker(folder, (), FOUR_SCORERS, **options) as picker:
            traffic = Traffic(picker)
            scene = Scene(api, kubelet, picker, traffic)

            async def is_ready() -> bool:
                return bool(await picker.endpoints()) and (await picker.get("/readyz"))[0] == 200

            await until(is_ready)
            task = asyncio.create_task(traffic.run())
            try:
                yield scene
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert traffic.failed == []


async def test_pods_terminate_flap_move_and_join_under_requests(tmp_path: Path) -> None:
    async with following(tmp_path) as scene:
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        scene.kubelet.run("c", "127.0.0.13", APP, grace_seconds=600)
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000", "127.0.0.13:8000")
        scene.kubelet.delete("a")  # its Pod stays, ready, for its grace
        await scene.serves("127.0.0.12:8000", "127.0.0.13:8000")
        scene.kubelet.move("b", "127.0.0.22")
        await scene.serves("127.0.0.22:8000", "127.0.0.13:8000")
        for is_ready in (False, True):  # all of the node's, as when its kubelet starts again
            for name in "bc":
                scene.kubelet.set_ready(name, is_ready)
                await asyncio.sleep(0)
        await scene.serves("127.0.0.22:8000", "127.0.0.13:8000")
        scene.kubelet.set_ready("b", False)
        await scene.serves("127.0.0.13:8000")


async def test_an_outage_of_the_api_server_does_not_stop_requests(tmp_path: Path) -> None:
    async with following(tmp_path) as scene:
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        await scene.api.go_away()
        scene.kubelet.delete("a")
        scene.kubelet.run("d", "127.0.0.14", APP)
        scene.api.write(pool(name="pool", targetPorts=[{"number": 8080}]))

        async def is_said() -> bool:
            status, text = await scene.picker.get("/readyz")
            is_shown = "the last known state is in use" in text
            assert not set(text) & set("<[")  # words, and nothing of Python's objects
            return status == 200 and is_shown and "no connection to 127.0.0.1:" in text

        await until(is_said)
        await scene.serves("127.0.0.11:8000", "127.0.0.12:8000")
        await scene.api.come_back(forget_changes=True)
        await scene.serves("127.0.0.12:8080", "127.0.0.14:8080")
