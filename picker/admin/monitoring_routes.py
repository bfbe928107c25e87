"""`/metrics`, `/healthz` and `/readyz`: for scrapers and probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from picker.metrics.picker_metrics import CONTENT_TYPE


class MonitoringRoutes:
    """Answers under any name: see `guarding`."""

    def __init__(
        self,
        page: Callable[[], Awaitable[bytes]],
        is_ready: Callable[[], bool],
        pool_problem: Callable[[], str | None],
    ) -> None:
        """`page` renders the metrics; `pool_problem` says why the pool may be old."""
        self._page = page
        self._is_ready = is_ready
        self._pool_problem = pool_problem

    def routes(self) -> list[web.RouteDef]:
        """All three."""
        return [
            web.get("/metrics", self._show_metrics),
            web.get("/healthz", self._show_health),
            web.get("/readyz", self._show_readiness),
        ]

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=await self._page(), headers={"Content-Type": CONTENT_TYPE})

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        """A pool that may be old is served all the same; the text says that it is."""
        problem = self._pool_problem()
        detail = "" if problem is None else f"{problem}\n"
        if self._is_ready():
            return web.Response(text=f"ready\n{detail}")
        return web.Response(status=503, text=f"not ready\n{detail}")
