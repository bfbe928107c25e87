"""Renderings, run: the picker's flags and rights, its Envoy, and their shutdown.

Only ports and files are others than in a Pod; the API server is that of the tests.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession, web

from fleet.envoy.binary import find_envoy
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import running_kube_api
from tests.support.kube.deployed_picker import (
    FIXED,
    LIMIT_SECONDS,
    account,
    picker_command,
    running,
    some_ports,
)
from tests.support.kube.manifests import NAMESPACE, container_of, file_of, kustomized
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("kubectl"), pytest.mark.envoy, pytest.mark.full]
FOLDER = "deploy/k8s/overlays/standalone"
LABELS = {"app.kubernetes.io/name": "pointsman-worker"}


@dataclass
class Workers:
    port: int
    served: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["prompt"] == "slow":
            self.arrived.set()
            await self.hold.wait()
        self.served.append(request.transport.get_extra_info("sockname")[0])
        return web.json_response({"choices": []})


@asynccontextmanager
async def workers(addresses: list[str], port: int) -> AsyncIterator[Workers]:
    serving = Workers(port)
    app = web.Application()
    app.router.add_post("/v1/completions", serving.serve)
    app.router.add_get("/metrics", _page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    for address in addresses:
        await web.TCPSite(runner, address, port).start()
    try:
        yield serving
    finally:
        serving.hold.set()
        await runner.cleanup()


async def _page(_: web.Request) -> web.Response:
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    return web.Response(text="".join(f"vllm:{name} 0\n" for name in names))


def _envoy(ports: dict[str, int], folder: Path) -> list[str]:
    objects = kustomized(FOLDER)
    container = container_of(objects, "envoy")
    text = file_of(objects, "envoy.yaml").replace("address: 0.0.0.0", "address: 127.0.0.1")
    for name, port in FIXED.items():
        text = text.replace(f"port_value: {port}\n", f"port_value: {ports[name]}\n")
    (folder / "envoy.yaml").write_text(text)
    (folder / "drain.sh").write_text(file_of(objects, "drain.sh"))
    words = [
        str(folder / Path(word).name) if word[0] == "/" else word for word in container["args"]
    ]
    return [str(find_envoy()), *words, "--log-level", "error"]


@dataclass(frozen=True)
class Scene:
    url: str
    ports: dict[str, int]
    workers: Workers
    nodes: Kubelet
    session: ClientSession
    drain: Path

    async def ask(self, prompt: str = "hello") -> int:
        body = {"model": "m", "prompt": prompt}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as reply:
                return reply.status
        except ClientConnectionError:
            return 0

    async def serves(self) -> bool:
        return await self.ask() == 200

    async def endpoints_are(self, number: int) -> bool:
        url = f"http://127.0.0.1:{self.ports['admin']}/clusters?format=json"
        async with self.session.get(url) as reply:
            [pool] = [c for c in (await reply.json())["cluster_statuses"] if c["name"] == "pool"]
        return len(pool.get("host_statuses", ())) == number


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Scene]:
    ports = some_ports()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_kube_api())
        serving = await stack.enter_async_context(
            workers(["127.0.0.2", "127.0.0.3"], ports["worker"])
        )
        session = await stack.enter_async_context(ClientSession())
        nodes = Kubelet(api)
        for number in (2, 3):
            nodes.run(f"w{number}", f"127.0.0.{number}", LABELS, namespace=NAMESPACE)
        nodes.run("other", "127.0.0.9", {"app": "other"}, namespace=NAMESPACE)
        environment = account(api, FOLDER, folder)
        stack.enter_context(running(picker_command(FOLDER, ports, folder), environment))
        stack.enter_context(running(_envoy(ports, folder), {}))
        url = f"http://127.0.0.1:{ports['http']}"
        yield Scene(url, ports, serving, nodes, session, folder / "drain.sh")


async def test_envoy_and_picker_serve_the_selected_pods(tmp_path: Path) -> None:
    async with standing(tmp_path) as scene:
        await until(scene.serves)
        await until(lambda: scene.endpoints_are(2))
        assert await scene.ask() == 200
        assert set(scene.workers.served) <= {"127.0.0.2", "127.0.0.3"}
        scene.nodes.delete("w2", NAMESPACE)
        await until(lambda: scene.endpoints_are(1))
        scene.workers.served.clear()
        for _ in range(10):
            assert await scene.ask() == 200
        assert set(scene.workers.served) == {"127.0.0.3"}


@asynccontextmanager
async def draining(
    folder: Path, seconds: int
) -> AsyncIterator[tuple[Scene, asyncio.Task[int], asyncio.subprocess.Process]]:
    """Drain for at most this number of seconds while a request is held back."""
    async with standing(folder) as scene:
        await until(scene.serves)
        slow = asyncio.create_task(scene.ask("slow"))
        await scene.workers.arrived.wait()
        drain = await asyncio.create_subprocess_exec(
            "bash", str(scene.drain), str(seconds), "0", str(scene.ports["admin"])
        )
        yield scene, slow, drain


async def test_the_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    async with draining(tmp_path, 60) as (scene, slow, drain):
        assert await scene.ask() == 200
        assert drain.returncode is None
        assert not slow.done()
        scene.workers.hold.set()
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await slow == 200
            assert await drain.wait() == 0


async def test_the_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    async with draining(tmp_path, 1) as (_, slow, drain):
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await drain.wait() == 0
        assert not slow.done()
        slow.cancel()
