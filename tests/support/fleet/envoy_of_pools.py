"""A real Envoy in front of real pickers of several pools, and workers that say whose they are."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import (
    DESTINATION_KEY,
    POOL_METADATA,
    BootstrapConfig,
    EndpointDiscovery,
    Mechanism,
    SocketAddress,
)
from tests.support.fleet.eds_scene import CONFIG, STEERING
from tests.support.fleet.envoy_process import EnvoyProcess, PickerProcess
from tests.support.local_ports import free_port
from tests.support.picker.metrics_pages import page
from tests.support.waiting import until
from tests.support.web_server import for_all_paths, serving

LIMIT_SECONDS = 120.0
CHOSEN = "x-chosen-pool"  # what Envoy may say of the pool that it has chosen
BODY = {"model": "m", "prompt": "hello", "max_tokens": 1}
SAID = {"pool", "worker", "destination", "path"}


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    pool: str | None = None
    worker: str | None = None
    destination: str | None = None
    path: str | None = None
    chosen: str | None = None


@dataclass
class PoolWorker:
    """Serves one pool, and says so. `running` are adapters that its metrics name."""

    pool: str
    port: int = 0
    models: Mapping[str, str | None] = field(default_factory=dict)
    running: Sequence[str] = ()

    @property
    def host_port(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.Response:
        if request.path in ("/health", "/metrics"):
            return web.Response(text=page(adapters=self.running))
        if self.models and request.path == "/v1/models" and DESTINATION_KEY not in request.headers:
            entries = [{"id": name, "parent": of} for name, of in self.models.items()]
            return web.json_response({"object": "list", "data": entries})
        await request.read()
        destination = request.headers.get(DESTINATION_KEY)
        said = {
            "pool": self.pool,
            "worker": self.host_port,
            "destination": destination,
            "path": request.path,
        }
        return web.json_response(said)


class PoolsScene:
    """Owns Envoy, and asks it; `workers` are those of each pool."""

    def __init__(self, folder: Path, workers: Mapping[str, Sequence[PoolWorker]]) -> None:
        self.folder, self.workers = folder, dict(workers)
        self.listen, self.admin = free_port(), free_port()
        self.envoy = EnvoyProcess(folder, self.admin)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_SECONDS))

    async def start_envoy(self, document: Mapping[str, Any] | str, threads: int = 2) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        await self.envoy.start(text, threads)
        await self.envoy.until_ready()

    async def close(self) -> None:
        await self.envoy.stop()
        await self._http.close()

    async def ask(
        self, place: str, worker: PoolWorker | None = None, *, body: bool = True, **headers: str
    ) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if worker is not None:
            sent[STEERING] = worker.host_port
        method, path = ("POST", "completions") if body else ("GET", "models")
        return await self.send(method, f"/{place}/v1/{path}", BODY if body else None, sent)

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        form: aiohttp.FormData | None = None,
    ) -> Answer:
        url = f"http://127.0.0.1:{self.listen}{path}"
        sent = {"json": body} if form is None else {"data": form}
        async with self._http.request(method, url, headers=headers, **sent) as response:
            text = await response.text()
            said = json.loads(text) if response.status == 200 else {}
            known = {key: said[key] for key in SAID & said.keys()}
            return Answer(response.status, text, chosen=response.headers.get(CHOSEN), **known)

    async def by_model(self, model: str, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send("POST", "/v1/completions", BODY | {"model": model}, sent)

    async def by_form(self, model: str) -> Answer:
        form = aiohttp.FormData()
        form.add_field("file", bytes(200_000), filename="a.wav", content_type="audio/wav")
        form.add_field("model", model)
        return await self.send("POST", "/v1/audio/transcriptions", form=form)

    async def crowd(
        self, places: Sequence[str], count: int, at_once: int = 12
    ) -> list[tuple[str, Answer]]:
        """Send `count` requests to each place; the pool that a client names has no effect."""
        room = asyncio.Semaphore(at_once)

        async def one(at: int) -> tuple[str, Answer]:
            place, lie = places[at % len(places)], places[(at + 1) % len(places)]
            async with room:
                return place, await self.ask(place, body=at % 4 < 2, x_pointsman_pool=lie)

        return await asyncio.gather(*(one(at) for at in range(count * len(places))))

    async def until_picked(self, place: str, pool: str | None = None) -> None:
        """Return once what is picked for each worker of the pool arrives there."""
        for worker in self.workers[pool or place]:
            in_a_row = 0

            async def does_it(worker: PoolWorker = worker) -> bool:
                nonlocal in_a_row
                answer = await self.ask(place, worker)
                right = answer.worker == answer.destination == worker.host_port
                in_a_row = in_a_row + 1 if right else 0
                return in_a_row == 10

            await until(does_it, what=f"{place} is picked for")

    async def counted(self, picker: PickerProcess, name: str) -> dict[str, float]:
        async with self._http.get(f"http://127.0.0.1:{picker.http}/metrics") as response:
            text = await response.text()
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels.get("inference_pool", "")] += sample.value
        return dict(found)


def served_pool(name: str, *more: str) -> str:
    return ",".join((f"name={name},endpoints-file={name}.yaml,config-file=config.yaml", *more))


@asynccontextmanager
async def pools_scene(folder: Path, *pools: str) -> AsyncIterator[PoolsScene]:
    """Two workers for each pool, in the endpoints file of its name; nothing else runs yet."""
    (folder / "config.yaml").write_text(CONFIG)
    async with AsyncExitStack() as stack:
        workers = {name: (PoolWorker(name), PoolWorker(name)) for name in pools}
        for name, both in workers.items():
            for worker in both:
                server = serving(for_all_paths(worker.answer))
                worker.port = await stack.enter_async_context(server)
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
    try:
        for picker in pickers:
            await picker.start()
        yield
    finally:
        for picker in pickers:
            await picker.kill()


Document = dict[str, Any]
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
HOST = "127.0.0.1"


def bootstrap(
    scene: PoolsScene,
    picker: PickerProcess,
    mechanism: Mechanism = Mechanism.ORIGINAL_DST,
    **changes: Any,
) -> Document:
    """The bootstrap for one picker of all pools, with longer timeouts for a busy machine."""
    config = BootstrapConfig(
        listen=SocketAddress(HOST, scene.listen),
        admin=SocketAddress(HOST, scene.admin),
        picker=SocketAddress(HOST, picker.grpc),
        picker_health=SocketAddress(HOST, picker.health),
        discovery=EndpointDiscovery(SocketAddress(HOST, picker.xds)),
        pools=tuple(scene.workers),
        mechanism=mechanism,
        **changes,
    )
    document: Document = json.loads(to_json(build(config)))
    clusters = document["static_resources"]["clusters"]
    (asked,) = (one for one in clusters if one["name"] == "picker")
    asked["connect_timeout"] = "10s"
    return document


def by_metadata(name: str) -> Document:
    return _overrides({"grpc_initial_metadata": [{"key": POOL_METADATA, "value": name}]})


def by_cluster(cluster: str) -> Document:
    return _overrides({"grpc_service": {"envoy_grpc": {"cluster_name": cluster}}})


def add_picker(document: Document, cluster: str, port: int, health_port: int) -> None:
    clusters = document["static_resources"]["clusters"]
    made = copy.deepcopy(next(one for one in clusters if one["name"] == "picker"))
    made["name"] = made["load_assignment"]["cluster_name"] = cluster
    (member,) = made["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint = member["endpoint"]
    endpoint["address"]["socket_address"]["port_value"] = port
    health = endpoint["health_check_config"]["address"]["socket_address"]
    health["port_value"] = health_port
    clusters.append(made)


def asking(document: Document, pool: str, settings: Document) -> None:
    (route,) = (one for one in routes(document) if one["name"] == pool)
    route["typed_per_filter_config"] = settings


def add_route(document: Document, place: str, pool: str, settings: Document | None) -> None:
    """Add a further route to a pool, which asks in this way, or as the filter does."""
    (route,) = (copy.deepcopy(one) for one in routes(document) if one["name"] == pool)
    route["name"], route["match"] = place, {"prefix": f"/{place}/"}
    route["typed_per_filter_config"] = settings or {}
    routes(document).insert(0, route)


def add_split(document: Document, place: str, shares: dict[str, tuple[int, Document]]) -> None:
    """Add a route to several pools by weight, each asked for in its way; the answer says which."""
    first = next(iter(shares))
    add_route(document, place, first, None)
    action = routes(document)[0]["route"]
    del action["cluster"]
    action["weighted_clusters"] = {
        "clusters": [
            {
                "name": pool,
                "weight": weight,
                "typed_per_filter_config": settings,
                "response_headers_to_add": [{"header": {"key": CHOSEN, "value": pool}}],
            }
            for pool, (weight, settings) in shares.items()
        ]
    }


def routes(document: Document) -> list[Document]:
    (listener,) = document["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["route_config"]["virtual_hosts"][0]["routes"]


def http_filters(document: Document) -> list[Document]:
    (listener,) = document["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    filters: list[Document] = manager["http_filters"]
    return filters


def ext_proc(document: Document) -> Document:
    return http_filters(document)[0]["typed_config"]


def _overrides(overrides: Document) -> Document:
    return {"envoy.filters.http.ext_proc": {"@type": PER_ROUTE, "overrides": overrides}}
