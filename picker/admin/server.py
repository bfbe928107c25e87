"""The HTTP port for users and monitoring.

It authenticates clients only if it is protected (`authorizing`), so it listens on the loopback
address by default, and is read-only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aiohttp import web

from base.series import Counter
from picker.admin.answers import Turns, as_error, as_json
from picker.admin.guarding import (
    Authorize,
    HostCheck,
    PageNames,
    add_security_headers,
    authorizing,
    guarding,
)
from picker.admin.metrics_page import merged
from picker.admin.routes import PoolPages, monitoring_routes, page_files, page_routes
from picker.admin.views import LIST, PREFIX, PoolSummary, PoolsView
from picker.metrics.picker_metrics import PickerMetrics

SHUTDOWN_SECONDS: Final = 1.0
_MOVED: Final = ("/endpoints", "/queues", "/decisions", "/decisions/{id}", "/config")
_SHOWN_LENGTH: Final = 200


class AdminServer:
    """Owns the port. `failures` counts unexpected errors by page."""

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        pools: Sequence[PoolPages],
        failures: Counter,
        names: PageNames | None = None,
    ) -> None:
        self._routes, self._pools, self._failures = routes, pools, failures
        self._names = names or PageNames()
        self._check = HostCheck()
        self._authorize: Authorize | None = None
        self._runner: web.AppRunner | None = None

    @classmethod
    def of_one(cls, pool: PoolPages, is_ready: Callable[[], bool]) -> AdminServer:
        return cls(pool.routes(is_ready), [pool], pool.source.metrics.admin_failures_total)

    def protect(self, authorize: Authorize) -> None:
        """Serve only clients that `authorize` allows; called before `start`."""
        self._authorize = authorize

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen, in plain text if `tls` is None; return the bound port. Raises `OSError`."""
        guard = guarding(self._check, self._failures, self._names)
        application = web.Application(middlewares=[guard])
        if self._authorize is not None:
            application.middlewares.append(authorizing(self._authorize, self._names))
        application.add_routes(self._routes)
        application.on_response_prepare.append(add_security_headers)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        # The bound addresses, since a name may resolve to several.
        self._check.bound(host, [str(address[0]) for address in runner.addresses])
        return int(runner.addresses[0][1])

    async def watch(self) -> None:
        await asyncio.gather(*(pool.watch() for pool in self._pools))

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class SeveralPools:
    """The port of several pools, each with its readiness and its pages below `/pools/NAME`."""

    def __init__(
        self,
        pools: Mapping[str, tuple[PoolPages, Callable[[], bool]]],
        metrics: PickerMetrics,
        is_ready: Callable[[], bool],
        turns: Turns | None = None,
    ) -> None:
        self._pools, self._metrics, self._is_ready = dict(pools), metrics, is_ready
        self._turns = Turns() if turns is None else turns

    def server(self) -> AdminServer:
        """Create the server; a client that may see one pool may see every pool."""
        routes, names = self._top(), {PREFIX + "{rest}": LIST}
        for key, (pages, is_ready) in self._pools.items():
            for one in pages.routes(is_ready, key):
                routes.append(web.get(PREFIX + key + one.path, one.handler))
                names.setdefault(PREFIX + key + one.path, one.path)
        # Last: a pool NAMESPACE/metrics must not hide the page of a pool NAMESPACE.
        for key in self._pools:
            routes.append(web.get(PREFIX + key, self._add_slash))
            names.setdefault(PREFIX + key, "/")
        pools = [pages for pages, _ in self._pools.values()]
        return AdminServer(routes, pools, self._metrics.admin_failures_total, PageNames(names))

    def _view(self, key: str) -> PoolSummary:
        pages, is_ready = self._pools[key]
        source = pages.source
        return PoolSummary(
            name=key,
            path=f"{PREFIX}{key}/",
            ready=is_ready(),
            endpoints=len(source.datastore.snapshot().candidates),
            inflight_requests=source.inflight.own_total,
            problem=source.problem(),
        )

    def _top(self) -> list[web.RouteDef]:
        return [
            *monitoring_routes(self._page, self._is_ready, self._problem),
            *page_routes(page_files()["pools.html"]),
            web.get(LIST, self._show_pools),
            *(web.get(path, self._say_where) for path in _MOVED),
            web.get(PREFIX + "{rest:.*}", self._say_which),
        ]

    async def _show_pools(self, _request: web.Request) -> web.Response:
        return as_json(PoolsView(tuple(self._view(key) for key in self._pools)))

    async def _page(self) -> bytes:
        counted = {key: pages.source.metrics for key, (pages, _) in self._pools.items()}
        return await merged(self._metrics, counted, self._turns)

    def _problem(self) -> str | None:
        found = {key: pages.source.problem() for key, (pages, _) in self._pools.items()}
        return "; ".join(f"{key}: {one}" for key, one in found.items() if one) or None

    async def _add_slash(self, request: web.Request) -> web.Response:
        # The relative links of the page need the slash; the redirect is relative for proxies.
        last = request.path.rpartition("/")[2]
        return web.Response(status=308, headers={"Location": f"{last}/"})

    async def _say_where(self, request: web.Request) -> web.Response:
        # A list of pages and no redirect: the picker must not choose a pool.
        asked = request.rel_url.raw_path[:_SHOWN_LENGTH]
        places = ", ".join(f"{PREFIX}{key}{asked}" for key in self._pools)
        return as_error(404, f"this picker serves several pools; ask one of them: {places}")

    async def _say_which(self, request: web.Request) -> web.Response:
        asked = request.rel_url.raw_path.partition(PREFIX)[2]
        if any(f"{asked}/".startswith(f"{key}/") for key in self._pools):
            raise web.HTTPNotFound
        places = ", ".join(f"{PREFIX}{key}/" for key in self._pools)
        shown = asked[:_SHOWN_LENGTH]
        return as_error(404, f"there is no pool at {PREFIX}{shown}; this picker has {places}")
