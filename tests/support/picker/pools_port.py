"""HTTP ports of pickers of several pools: over made-up state, and of whole pickers."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yarl

from picker.admin.server import SeveralPools as PoolsServer
from picker.metrics.picker_metrics import PickerMetrics
from tests.support.picker.admin_scene import Scene
from tests.support.picker.metrics_pages import Pod
from tests.support.picker.pools_scene import SeveralPools, pool_flags, pools_picker
from tests.support.picker.whole_picker import write_endpoints
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
        self.server = PoolsServer(pages, self.process, lambda: not self.away).server()

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


@asynccontextmanager
async def whole_pools(
    folder: Path, pools: Mapping[str, Mapping[str, int]]
) -> AsyncIterator[SeveralPools]:
    flags = []
    for place, (key, endpoints) in enumerate(pools.items()):
        path = folder / f"pool-{place}.yaml"
        write_endpoints(
            path, [Pod(name, HOST, None, port=port) for name, port in endpoints.items()]
        )
        flags.append(pool_flags(key, endpoints_file=path))
    async with pools_picker(folder, {"pools": tuple(flags)}) as running:
        await until(lambda: asked(running.url, "/readyz"), lambda found: found.status == 200)
        yield running
