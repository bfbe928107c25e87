"""The pages of one pool, and those that a picker of several has besides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from picker.admin.answers import as_error, as_json, whole_number
from picker.admin.history import INTERVAL_SECONDS, SAMPLES, EndpointSample, History, series
from picker.admin.metrics_page import of_pool
from picker.admin.views import HEALTHY, AdminSource, EndpointView, HealthView
from picker.metrics.picker_metrics import CONTENT_TYPE
from picker.types import Candidate

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 1000
LAST: Final = "last"
TURN: Final = 50  # endpoints are encoded in a millisecond or two
CONTENT_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_INDEX, _POOLS = "index.html", "pools.html"
_PLACE: Final = '<p id="pool" hidden></p>'  # in the page, for which of several pools it is about
_WHICH: Final = (
    '<nav aria-label="Pools" class="which"><a href="{up}">All pools</a>'
    ' <span aria-hidden="true">/</span> <strong id="pool">{key}</strong></nav>'
)
T = TypeVar("T")


class PoolPages:
    """The pages of one pool. Owns its last two minutes. `clock` is the one that scrapes are timed
    with, in seconds.
    """

    def __init__(self, source: AdminSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.source, self.history = source, History()
        self._clock = clock

    def routes(self, is_ready: Callable[[], bool], key: str = "") -> list[web.RouteDef]:
        """All pages. `key` is what the pool is called where it is one of several; then the series
        of the process are left out.
        """
        source = self.source

        async def page() -> bytes:
            return of_pool(source.metrics) if key else source.metrics.render()

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
        """Sample the pool once a second, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Add to the history what is known now."""
        recent = self.source.traffic()
        candidates = self.source.datastore.snapshot().candidates
        samples = {}
        for one in candidates:
            metrics, sent = one.metrics, recent.get(one.key)
            samples[one.key] = EndpointSample(
                running=None if metrics is None else metrics.running_requests,
                waiting=None if metrics is None else metrics.waiting_requests,
                kv_cache_usage=None if metrics is None else metrics.kv_cache_usage,
                prefix_hit_share=None if sent is None else sent.prefix_hit_share,
                inflight=self.source.inflight.requests(one.key),
                requests_per_second=None if sent is None else sent.requests_per_second,
            )
        self.history.record(samples)

    async def _show_endpoints(self, request: web.Request) -> web.Response:
        """An `EndpointsView`, piece by piece: of a thousand endpoints it is a megabyte or two.
        `?history=N` adds the last N samples.
        """
        samples = whole_number(request, "history", default=0, least=0, most=SAMPLES)
        health = self.source.health()
        candidates = self.source.datastore.snapshot().candidates
        last, taken = self.history.cut(samples)
        endpoints = await _encoded(candidates, lambda one: self._describe(one, health))
        if not samples:
            return as_json({"endpoints": endpoints})
        rows = await _encoded(taken.values(), series)
        history = {
            "last": last,
            "interval_seconds": INTERVAL_SECONDS,
            "endpoints": dict(zip(taken, rows, strict=True)),
        }
        return as_json({"endpoints": endpoints, "history": history})

    def _describe(self, candidate: Candidate, health: Mapping[str, HealthView]) -> EndpointView:
        endpoint, last = candidate.endpoint, candidate.last_metrics
        recent = self.history.latest(candidate.key)
        return EndpointView(
            key=candidate.key,
            name=endpoint.name,
            namespace=endpoint.namespace,
            address=endpoint.host_port,
            labels=dict(endpoint.labels),
            health=health.get(candidate.key, HEALTHY),
            inflight_requests=self.source.inflight.requests(candidate.key),
            metrics=candidate.metrics,
            last_metrics=last,
            metrics_age_seconds=(
                None if last is None else max(0.0, self._clock() - last.updated_at_seconds)
            ),
            requests_per_second=recent.requests_per_second,
            prefix_hit_share=recent.prefix_hit_share,
        )

    async def _show_queues(self, _request: web.Request) -> web.Response:
        return as_json(self.source.queues())

    async def _show_decisions(self, request: web.Request) -> web.Response:
        limit = whole_number(request, "limit", DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
        return as_json({"decisions": list(self.source.decisions(limit))[:limit]})

    async def _show_decision(self, request: web.Request) -> web.Response:
        """An id is anything that a client chose; it comes escaped as one part of the path."""
        request_id = request.match_info["id"]
        is_last = request_id == LAST
        decision = self.source.decision(None if is_last else request_id)
        if decision is not None:
            return as_json(decision)
        if is_last:
            return as_error(404, "there was no request yet")
        text = f"nothing is known of request '{request_id[:200]}', or not any more"
        return as_error(404, text)

    async def _show_config(self, _request: web.Request) -> web.Response:
        return as_json(self.source.configuration())


async def _encoded(values: Iterable[T], what: Callable[[T], Any]) -> list[msgspec.Raw]:
    """What is said of each of very many; requests on this loop get their turn meanwhile."""
    done = []
    for number, value in enumerate(values, 1):
        done.append(msgspec.Raw(msgspec.json.encode(what(value))))
        if not number % TURN:
            await asyncio.sleep(0)
    return done


def monitoring_routes(
    page: Callable[[], Awaitable[bytes]],
    is_ready: Callable[[], bool],
    problem: Callable[[], str | None],
) -> list[web.RouteDef]:
    """`/metrics`, `/healthz` and `/readyz`, which are answered under any name: see `guarding`.
    `page` renders the metrics, `problem` says why the pool may be old.
    """

    async def show_metrics(_request: web.Request) -> web.Response:
        return web.Response(body=await page(), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def show_readiness(_request: web.Request) -> web.Response:
        """A pool that may be old is served all the same; the text says that it is."""
        found = problem()
        detail = "" if found is None else f"{found}\n"
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
    """Every file of the pages, by name."""
    folder = files("picker.admin").joinpath("page")
    found = [one for one in folder.iterdir() if _suffix(one.name) in CONTENT_TYPES]
    return {one.name: one.read_bytes() for one in found}


def pools_page() -> bytes:
    """The list of several pools."""
    return page_files()[_POOLS]


def _pool_page(key: str) -> bytes:
    """The page of the pool `key` of several; it is as many folders below their list as this has
    parts, and one more.
    """
    which = _WHICH.format(up="../" * (key.count("/") + 2), key=escape(key))
    title = f"<title>{escape(key)} · Pointsman</title>"
    text = page_files()[_INDEX].decode()
    return text.replace(_PLACE, which).replace("<title>Pointsman</title>", title).encode()


def page_routes(page: bytes) -> list[web.RouteDef]:
    """A page at `/`, and what it loads. Nothing else can be asked for: names are looked up."""

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
