"""A real picker that reports its endpoints to a real Envoy, with workers and clients."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.settings import BootstrapConfig, EndpointDiscovery, SocketAddress
from tests.support.fleet.envoy_process import EnvoyProcess, PickerProcess
from tests.support.local_ports import free_port
from tests.support.waiting import until
from tests.support.web_server import for_all_paths, serving

LIMIT_SECONDS = 120.0
CLIENTS = 4
STEERING = "test-epp-endpoint-selection"
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: header-based-testing-filter}
- {type: random-picker}
- {type: passthrough-parser}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: header-based-testing-filter}, {pluginRef: random-picker}]
requestHandler: {parsers: [{pluginRef: passthrough-parser}]}
"""


@dataclass
class Worker:
    """A server that is always healthy, in the pool or not. `go_on` ends its streams."""

    name: str
    port: int = 0
    served: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def host_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def entry(self) -> dict[str, object]:
        zone = {"topology.kubernetes.io/zone": f"zone-of-{self.name}"}
        return {"name": self.name, "address": "127.0.0.1", "port": self.port, "labels": zone}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics":
            return web.Response(text="")
        self.served += 1
        if request.path != "/stream":
            return web.Response(text=self.name)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


class DiscoveryScene:
    def __init__(self, folder: Path, is_delta: bool) -> None:
        self._folder = folder
        self._file = folder / "endpoints.yaml"
        (folder / "config.yaml").write_text(CONFIG)
        flags = ("--endpoints-file=endpoints.yaml", "--config-file=config.yaml")
        self.picker = PickerProcess(folder, (), *flags, "--pool-name=test-pool")
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_SECONDS))
        self.answers: Counter[str] = Counter()
        self.config = BootstrapConfig(
            listen=SocketAddress("127.0.0.1", free_port()),
            admin=SocketAddress("127.0.0.1", free_port()),
            picker=SocketAddress("127.0.0.1", self.picker.grpc),
            picker_health=SocketAddress("127.0.0.1", self.picker.health),
            discovery=EndpointDiscovery(
                SocketAddress("127.0.0.1", self.picker.xds), "test-pool", is_delta
            ),
            buffer_request_body=True,
            access_log_path=str(folder / "access.log"),
        )
        self.url = f"http://127.0.0.1:{self.config.listen.port}"
        self.envoy = EnvoyProcess(folder, self.config.admin.port)  # type: ignore[union-attr]

    def list_workers(self, *workers: Worker) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"endpoints": [one.entry for one in workers]}))
        fresh.rename(self._file)

    async def close(self) -> None:
        await self.envoy.stop()
        await self.picker.kill()
        await self._http.close()

    async def ask(self, worker: Worker | None = None) -> str:
        headers = {} if worker is None else {STEERING: worker.host_port}
        url = f"{self.url}/v1/x"
        async with self._http.post(url, data=b"x" * 1000, headers=headers) as response:
            text = await response.text()
            return text if response.status == 200 else f"{response.status}: {text}"

    async def until_serves(self, worker: Worker) -> None:
        """Return once what is picked for `worker` arrives there, by any of Envoy's threads."""
        in_a_row = 0

        async def does_it() -> bool:
            nonlocal in_a_row
            in_a_row = in_a_row + 1 if await self.ask(worker) == worker.name else 0
            return in_a_row == 10

        await until(does_it, what=f"{worker.name} serves")

    @asynccontextmanager
    async def stream(self, worker: Worker) -> AsyncIterator[aiohttp.ClientResponse]:
        url, headers = f"{self.url}/stream", {STEERING: worker.host_port}
        async with self._http.post(url, data=b"x", headers=headers) as response:
            assert await response.content.readline() == b"data: first\n"
            yield response

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Run clients that count the answers of each server while the block runs."""
        stop = asyncio.Event()

        async def go_on() -> None:
            while not stop.is_set():
                self.answers[await self.ask()] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(go_on())
            try:
                yield
            finally:
                stop.set()

    async def answered(self, count: int) -> Counter[str]:
        before = self.answers.copy()
        await until(lambda: self.answers.total() >= before.total() + count, what="more answers")
        return self.answers - before

    async def series(self, name: str) -> float:
        async with self._http.get(f"http://127.0.0.1:{self.picker.http}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def access_log(self, text: str) -> None:
        path = self._folder / "access.log"
        await until(lambda: path.exists() and text in path.read_text(), what=f"a line with {text}")

    async def until_members(self, count: int) -> None:
        await self.envoy.until_healthy("pool", count)


@asynccontextmanager
async def running_worker(name: str) -> AsyncIterator[Worker]:
    worker = Worker(name)
    async with serving(for_all_paths(worker.answer)) as worker.port:
        try:
            yield worker
        finally:
            worker.go_on.set()


@asynccontextmanager
async def discovery_scene(
    folder: Path, is_delta: bool = False
) -> AsyncIterator[tuple[DiscoveryScene, list[Worker]]]:
    """Three workers of which the first is the pool; Envoy was there before the picker."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(name)) for name in "abc"]
        scene = DiscoveryScene(folder, is_delta)
        stack.push_async_callback(scene.close)
        scene.list_workers(workers[0])
        await scene.envoy.start(to_yaml(build(scene.config)), threads=2)
        await scene.picker.start()
        await scene.until_members(1)
        yield scene, workers
