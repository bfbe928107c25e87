"""HTTP ports of pickers of several pools: over made-up state, and of whole pickers."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import yarl

from picker.admin.server import SeveralPools
from picker.cli.options import Options, PoolFlags, Ports
from picker.metrics.picker_metrics import PickerMetrics
from tests.support.picker.admin_scene import Scene
from tests.support.picker.ext_proc_stream import GatewayStream, completion, destination_of
from tests.support.picker.whole_picker import started_picker
from tests.support.waiting import until

HOST = "127.0.0.1"


@dataclass
class PoolsPort:
    """Pools in `away` are not ready."""

    pools: dict[str, Scene]
    process: PickerMetrics = field(default_factory=PickerMetrics)
    away: set[str] = field(default_factory=set)
    url: str = ""

    def __post_init__(self) -> None:
        pages = {key: (scene.pages, self._readiness(key)) for key, scene in self.pools.items()}
        self.server = SeveralPools(pages, self.process, lambda: not self.away).server()

    def _readiness(self, key: str) -> Any:
        return lambda: key not in self.away


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["Content-Type"].startswith("application/json"), self.body
        return json.loads(self.body)


async def asked(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    async with (
        aiohttp.ClientSession() as http,
        http.request(
            method, yarl.URL(url + path, encoded=True), headers=headers, allow_redirects=False
        ) as answer,
    ):
        return Answer(answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def serving_pools(pools: Mapping[str, Scene], **wishes: Any) -> AsyncIterator[PoolsPort]:
    port = PoolsPort(dict(pools), **wishes)
    port.url = f"http://127.0.0.1:{await port.server.start(HOST, 0)}"
    try:
        yield port
    finally:
        await port.server.stop()


@dataclass
class WholePools:
    ports: Ports

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.metrics}"

    async def ask(self, key: str, request_id: str) -> str:
        async with grpc.aio.insecure_channel(f"{HOST}:{self.ports.pools[key]}") as channel:
            stream = GatewayStream(channel)
            answers = await stream.ask(completion(), {"x-request-id": request_id})
            await stream.rest()
            return destination_of(answers)


@asynccontextmanager
async def whole_pools(
    folder: Path, pools: Mapping[str, Mapping[str, int]]
) -> AsyncIterator[WholePools]:
    flags = []
    for place, (qualified, endpoints) in enumerate(pools.items()):
        namespace, _, name = qualified.partition("/")
        path = folder / f"pool-{place}.yaml"
        listed = [{"name": one, "address": HOST, "port": at} for one, at in endpoints.items()]
        path.write_text(json.dumps({"endpoints": listed}))
        flags.append(PoolFlags(name, namespace, grpc_port=0, endpoints_file=path))
    options = Options(
        pools=tuple(flags), bind_address=HOST, grpc_port=0, grpc_health_port=0, metrics_port=0
    )
    async with started_picker(options) as (_, ports):
        running = WholePools(ports)
        await until(lambda: asked(running.url, "/readyz"), lambda found: found.status == 200)
        yield running
