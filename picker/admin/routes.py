"""The routes of one pool, and those that a picker of several pools adds."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from base.series import CONTENT_TYPE
from picker.admin.answers import Turns, as_error, as_json, whole_number
from picker.admin.history import (
    INTERVAL_SECONDS,
    SAMPLES,
    EndpointSample,
    EndpointValues,
    History,
    PoolValues,
)
from picker.admin.metrics_page import of_pool, whole
from picker.admin.views import HEALTHY, AboutView, ConfigView, EndpointView, HealthView, PoolRates
from picker.decisions.views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView
from picker.metrics.picker_metrics import PickerMetrics, batched
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.telemetry.traffic import NO_WAIT, Served, ServedWindow, Traffic, longest_wait
from picker.types import Candidate, EndpointMetrics

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 1000  # bounds the work of one answer
LAST: Final = "last"
TURN: Final = 50  # endpoints are encoded in a millisecond or two
CONTENT_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_INDEX = "index.html"
_PLACE: Final = '<p id="pool" hidden></p>'  # replaced by the name, if the pool is one of several
_WHICH: Final = (
    '<nav aria-label="Pools" class="which"><a href="{up}">All pools</a>'
    ' <span aria-hidden="true">/</span> <strong id="pool">{key}</strong></nav>'
)
_NOTHING: Final = Served()
T = TypeVar("T")


class AdminSource(Protocol):
    @property
    def metrics(self) -> PickerMetrics: ...

    @property
    def datastore(self) -> Datastore: ...

    @property
    def inflight(self) -> InflightLoad: ...

    def about(self) -> AboutView: ...

    def queues(self) -> QueuesView: ...

    def decisions(self, limit: int) -> Iterable[RecordSummary]: ...

    def decision(self, request_id: str | None) -> RecordView | None:
        """Return the request with this id, or the last request if the id is None."""

    def health(self) -> Mapping[str, HealthView]:
        """Return the health of endpoints by key; an endpoint that is absent is healthy."""

    def traffic(self) -> Traffic:
        """Return a sample of the traffic by endpoint; called once a second."""

    def configuration(self) -> ConfigView: ...

    def problem(self) -> str | None:
        """Return what is wrong with the pool or its discovery; None if nothing is."""


class PoolPages:
    """The pages of one pool. Owns its history; `turns` is shared with other pools."""

    def __init__(
        self,
        source: AdminSource,
        clock: Callable[[], float] = time.monotonic,
        turns: Turns | None = None,
    ) -> None:
        self.source, self.history = source, History()
        self.turns = Turns() if turns is None else turns
        self._window = ServedWindow()
        self._served: Mapping[str, Served] = {}
        self._served_by_all = Served()
        self._queues = QueuesView()
        self._loads: dict[str, EndpointMetrics | None] = {}  # at the last sample, by key
        self._clock = clock

    def routes(self, is_ready: Callable[[], bool], key: str = "") -> list[web.RouteDef]:
        """Return all routes; `key` is the pool's name if it is one of several."""
        source = self.source

        async def page() -> bytes:
            return await whole(source.metrics, of_pool(source.metrics) if key else None, self.turns)

        return [
            *monitoring_routes(page, is_ready, source.problem),
            web.get("/endpoints", self._show_endpoints),
            web.get("/queues", self._show_queues),
            web.get("/decisions", self._show_decisions),
            web.get("/decisions/{id}", self._show_decision),
            web.get("/config", self._show_config),
            *page_routes(_pool_page(key) if key else page_files()[_INDEX]),
        ]

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.sample()

    def sample(self) -> None:
        traffic = self.source.traffic()
        candidates = self.source.datastore.snapshot().candidates
        known = {one.key: one.metrics for one in candidates if one.metrics is not None}
        totals = {key: one.served for key, one in known.items()}
        self._served, self._served_by_all = self._window.sample(totals, traffic.waits)
        self._queues = self.source.queues()
        self._loads = {one.key: one.metrics for one in candidates}
        samples: dict[str, EndpointSample] = {}
        for one in candidates:
            metrics, sent = one.metrics, traffic.endpoints.get(one.key)
            served = self._served.get(one.key, _NOTHING)
            samples[one.key] = EndpointValues(
                running=None if metrics is None else metrics.running_requests,
                waiting=None if metrics is None else metrics.waiting_requests,
                kv_cache_usage=None if metrics is None else metrics.kv_cache_usage,
                prefix_hit_share=None if sent is None else sent.prefix_hit_share,
                inflight=self.source.inflight.requests(one.key),
                requests_per_second=None if sent is None else sent.requests_per_second,
                ttft_p95_seconds=None if served.ttft is None else served.ttft.p95,
                tokens_per_second=served.tokens_per_second,
                failures_per_second=None if sent is None else sent.failures_per_second,
            )
        ttft, sums = self._served_by_all.ttft, known.values()
        pool = PoolValues(
            requests_per_second=traffic.pool.requests_per_second,
            refusals_per_second=traffic.pool.refusals_per_second,
            failures_per_second=traffic.pool.failures_per_second,
            ttft_p50_seconds=None if ttft is None else ttft.p50,
            ttft_p95_seconds=None if ttft is None else ttft.p95,
            tokens_per_second=self._served_by_all.tokens_per_second,
            running=_sum(one.running_requests for one in sums),
            waiting=_sum(one.waiting_requests for one in sums),
            queued=self._queues.queued_requests,
            queue_wait_p95_seconds=(
                None if traffic.waits is NO_WAIT else longest_wait(traffic.waits, 0.95)
            ),
        )
        self.history.record(samples, pool)

    async def _show_endpoints(self, request: web.Request) -> web.Response:
        """Return all endpoints; `?history=N` adds samples, and loads are then the last sample's."""
        samples = whole_number(request, "history", default=0, least=0, most=SAMPLES)
        health = self.source.health()
        candidates = self.source.datastore.snapshot().candidates
        # Everything is read before the first turn, so that all numbers are of one moment.
        last, keys, taken = self.history.cut(samples)
        pool_rows, queues = self.history.pool(samples), self._queues
        loads = self._loads if samples else {}
        rates, about = self._pool(), self.source.about()
        endpoints = await self._encoded(self._describe(one, health, loads) for one in candidates)
        answer = {"endpoints": endpoints, "pool": rates, "about": about}
        if not samples:
            return as_json(answer)
        rows = await self._encoded(taken)
        history = {
            "last": last,
            "interval_seconds": INTERVAL_SECONDS,
            "endpoints": dict(zip(keys, rows, strict=True)),
            "pool": pool_rows,
            "queues": queues,
        }
        return as_json(answer | {"history": history})

    async def _encoded(self, values: Iterable[Any]) -> list[msgspec.Raw]:
        batches = (
            [msgspec.Raw(msgspec.json.encode(one)) for one in batch]
            for batch in batched(values, TURN)
        )
        return [one for batch in await self.turns.collect(batches) for one in batch]

    def _pool(self) -> PoolRates:
        latest = self.history.latest_pool
        return PoolRates(
            latest.requests_per_second,
            latest.refusals_per_second,
            latest.failures_per_second,
            latest.tokens_per_second,
            self._served_by_all.ttft,
        )

    def _describe(
        self,
        candidate: Candidate,
        health: Mapping[str, HealthView],
        loads: Mapping[str, EndpointMetrics | None],
    ) -> EndpointView:
        endpoint, last = candidate.endpoint, candidate.last_metrics
        recent, inflight = self.history.latest(candidate.key), None
        if candidate.key in loads:
            inflight = recent.inflight
        if inflight is None:
            inflight = self.source.inflight.requests(candidate.key)
        return EndpointView(
            key=candidate.key,
            name=endpoint.name,
            namespace=endpoint.namespace,
            address=endpoint.host_port,
            labels=dict(endpoint.labels),
            health=health.get(candidate.key, HEALTHY),
            inflight_requests=int(inflight),
            metrics=_shown(loads.get(candidate.key, candidate.metrics)),
            last_metrics=_shown(last),
            metrics_age_seconds=(
                None if last is None else max(0.0, self._clock() - last.updated_at_seconds)
            ),
            requests_per_second=recent.requests_per_second,
            prefix_hit_share=recent.prefix_hit_share,
            failures_per_second=recent.failures_per_second,
            tokens_per_second=recent.tokens_per_second,
            ttft=self._served.get(candidate.key, _NOTHING).ttft,
        )

    async def _show_queues(self, _request: web.Request) -> web.Response:
        return as_json(self.source.queues())

    async def _show_decisions(self, request: web.Request) -> web.Response:
        limit = whole_number(request, "limit", DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
        rows = await self._encoded(islice(self.source.decisions(limit), limit))
        return as_json({"decisions": rows})

    async def _show_decision(self, request: web.Request) -> web.Response:
        # `last` is no id that a client is likely to choose.
        request_id = request.match_info["id"]
        is_last = request_id == LAST
        decision = self.source.decision(None if is_last else request_id)
        if decision is not None:
            return as_json(decision)
        if is_last:
            return as_error(404, "there was no request yet")
        text = f"request '{request_id[:200]}' is unknown or no longer stored"
        return as_error(404, text)

    async def _show_config(self, _request: web.Request) -> web.Response:
        return as_json(self.source.configuration())


def _shown(metrics: EndpointMetrics | None) -> EndpointMetrics | None:
    return metrics if metrics is None or metrics.served is None else replace(metrics, served=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def monitoring_routes(
    page: Callable[[], Awaitable[bytes]],
    is_ready: Callable[[], bool],
    problem: Callable[[], str | None],
) -> list[web.RouteDef]:
    """Return the routes that any host name may use; `problem` says why the pool may be outdated."""

    async def show_metrics(_request: web.Request) -> web.Response:
        return web.Response(body=await page(), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_readiness(_request: web.Request) -> web.Response:
        found = problem()
        detail = "" if found is None else f"{found}\n"
        # Ready even with a problem: the last known endpoints still serve.
        if is_ready():
            return web.Response(text=f"ready\n{detail}")
        return web.Response(status=503, text=f"not ready\n{detail}")

    return [
        web.get("/metrics", show_metrics),
        web.get("/healthz", show_health),
        web.get("/readyz", show_readiness),
    ]


@cache
def page_files() -> dict[str, bytes]:
    folder = files("picker.admin").joinpath("page")
    found = [one for one in folder.iterdir() if _suffix(one.name) in CONTENT_TYPES]
    return {one.name: one.read_bytes() for one in found}


def _pool_page(key: str) -> bytes:
    """Return the page of pool `key`, one of several, with links relative to its depth."""
    which = _WHICH.format(up="../" * (key.count("/") + 2), key=escape(key))
    title = f"<title>{escape(key)} · Pointsman</title>"
    text = page_files()[_INDEX].decode()
    return text.replace(_PLACE, which).replace("<title>Pointsman</title>", title).encode()


def page_routes(page: bytes) -> list[web.RouteDef]:
    async def show_page(_request: web.Request) -> web.Response:
        return _file(page, _INDEX)

    async def show_file(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in page_files():
            raise web.HTTPNotFound
        return _file(page_files()[name], name)

    return [web.get("/", show_page), web.get("/page/{name}", show_file)]


def _file(content: bytes, name: str) -> web.Response:
    kind = CONTENT_TYPES[_suffix(name)]
    return web.Response(body=content, content_type=kind, charset="utf-8")


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
