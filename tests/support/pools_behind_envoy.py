"""Workers of several pools, pickers as processes, and one real Envoy in front of all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from eds_scene import CONFIG, STEERING
from envoy_process import EnvoyProcess
from local_ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from fleet.envoy.settings import DESTINATION_KEY

LIMIT_SECONDS = 60.0
CHOSEN = "x-chosen-pool"  # what Envoy may say of the pool that it has chosen
BODY = {"model": "m", "prompt": "hello", "max_tokens": 1}


@dataclass(frozen=True)
class Answer:
    """What a client got: of which pool the worker says that it is, which endpoint the picker had
    named to it, and which pool Envoy says that it has chosen.
    """

    status: int
    text: str
    pool: str | None = None
    worker: str | None = None
    told: str | None = None
    path: str | None = None
    chosen: str | None = None


@dataclass
class PoolWorker:
    """A server of one pool, which says so."""

    pool: str
    port: int = 0

    @property
    def host_port(self) -> str:
        """As destinations name it."""
        return f"127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.Response:
        """Who it is, and what it was told."""
        if request.path in ("/health", "/metrics"):
            return web.Response(text="")
        await request.read()
        told = request.headers.get(DESTINATION_KEY)
        said = {"pool": self.pool, "worker": self.host_port, "told": told, "path": request.path}
        return web.json_response(said)


class PickerProcess:
    """A picker on ports that it keeps when it is started again; `pools` are `--pool` flags."""

    def __init__(self, folder: Path, pools: Sequence[str], *flags: str) -> None:
        self.grpc, self.health, self.http, self.xds = (free_port() for _ in range(4))
        self._folder = folder
        self._flags = (*(f"--pool={one}" for one in pools), *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker", "--bind-address=127.0.0.1", *self._flags),
            *(f"--grpc-port={self.grpc}", f"--grpc-health-port={self.health}"),
            *(f"--metrics-port={self.http}", f"--xds-port={self.xds}", "--secure-serving=false"),
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    async def kill(self) -> None:
        """As the system does when memory is short."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


class PoolsScene:
    """Owns Envoy, and asks it; `workers` are those of each pool."""

    def __init__(self, folder: Path, workers: Mapping[str, Sequence[PoolWorker]]) -> None:
        self.folder, self.workers = folder, workers
        self.listen, self.admin = free_port(), free_port()
        self.envoy = EnvoyProcess(folder, self.admin)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_SECONDS))

    async def start_envoy(self, document: Mapping[str, Any] | str, threads: int = 2) -> None:
        """Listen, with a bootstrap that has the scene's ports; of pickers that tell of endpoints
        one has to run.
        """
        text = document if isinstance(document, str) else json.dumps(document)
        await self.envoy.start(text, threads)
        await self.envoy.until_ready()

    async def close(self) -> None:
        """End it."""
        await self.envoy.stop()
        await self._http.close()

    async def ask(
        self, place: str, worker: PoolWorker | None = None, *, body: bool = True, **headers: str
    ) -> Answer:
        """One request below `/place/`, for `worker` if the picker is to be told so."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if worker is not None:
            sent[STEERING] = worker.host_port
        method, path = ("POST", "completions") if body else ("GET", "models")
        url = f"http://127.0.0.1:{self.listen}/{place}/v1/{path}"
        data = BODY if body else None
        async with self._http.request(method, url, json=data, headers=sent) as response:
            text = await response.text()
            said = json.loads(text) if response.status == 200 else {}
            return Answer(response.status, text, chosen=response.headers.get(CHOSEN), **said)

    async def crowd(
        self, places: Sequence[str], count: int, at_once: int = 12
    ) -> list[tuple[str, Answer]]:
        """So many requests to each place, so many at a time, every other one with a body; each
        client asks for another pool by a header of its own, which means nothing.
        """
        room = asyncio.Semaphore(at_once)

        async def one(at: int) -> tuple[str, Answer]:
            place, lie = places[at % len(places)], places[(at + 1) % len(places)]
            async with room:
                return place, await self.ask(place, body=at % 4 < 2, x_pointsman_pool=lie)

        return await asyncio.gather(*(one(at) for at in range(count * len(places))))

    async def until_picked(self, place: str, pool: str | None = None) -> None:
        """Return once what is picked for a worker arrives there, for each worker of the pool; each
        of Envoy's threads learns of the picker and of endpoints by itself.
        """
        for worker in self.workers[pool or place]:
            in_a_row = 0

            async def does_it(worker: PoolWorker = worker) -> bool:
                nonlocal in_a_row
                answer = await self.ask(place, worker)
                right = answer.worker == answer.told == worker.host_port
                in_a_row = in_a_row + 1 if right else 0
                return in_a_row == 10

            await until(does_it, what=f"{place} is picked for")

    async def counted(self, picker: PickerProcess, name: str) -> dict[str, float]:
        """A counter of a picker by pool; "" where it is of the process."""
        async with self._http.get(f"http://127.0.0.1:{picker.http}/metrics") as response:
            text = await response.text()
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels.get("inference_pool", "")] += sample.value
        return dict(found)


def served_pool(name: str, *more: str) -> str:
    """The flag for a pool whose endpoints are in the file of its name."""
    return ",".join((f"name={name},endpoints-file={name}.yaml,config-file=config.yaml", *more))


@asynccontextmanager
async def pools_scene(folder: Path, *pools: str) -> AsyncIterator[PoolsScene]:
    """Two workers for each pool, in the endpoints file of its name; nothing else runs yet."""
    (folder / "config.yaml").write_text(CONFIG)
    async with AsyncExitStack() as stack:
        workers = {name: (PoolWorker(name), PoolWorker(name)) for name in pools}
        for name, both in workers.items():
            for worker in both:
                await stack.enter_async_context(_serving(worker))
            entries = [
                {"name": f"{name}-{at}", "address": "127.0.0.1", "port": worker.port}
                for at, worker in enumerate(both)
            ]
            (folder / f"{name}.yaml").write_text(json.dumps({"endpoints": entries}))
        scene = PoolsScene(folder, workers)
        stack.push_async_callback(scene.close)
        yield scene


@asynccontextmanager
async def running(*pickers: PickerProcess) -> AsyncIterator[None]:
    """They have been started, and are ended."""
    try:
        for picker in pickers:
            await picker.start()
        yield
    finally:
        for picker in pickers:
            await picker.kill()


@asynccontextmanager
async def _serving(worker: PoolWorker) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", worker.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        worker.port = runner.addresses[0][1]
        yield
    finally:
        await runner.cleanup()
