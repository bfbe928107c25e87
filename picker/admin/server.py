"""The HTTP port for people and monitoring: metrics, health, the endpoints as they are known.

It has no authentication, so it listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.metrics import CONTENT_TYPE, PickerMetrics
from picker.types import Candidate

SHUTDOWN_SECONDS = 1.0


class AdminServer:
    """Serves `/metrics`, `/healthz` (the process answers), `/readyz` and `/endpoints`."""

    def __init__(
        self,
        metrics: PickerMetrics,
        datastore: Datastore,
        inflight: InflightLoad,
        is_ready: Callable[[], bool],
        page: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`page` renders `/metrics` where more than `metrics` is to be told."""
        self._metrics = metrics
        self._page = page
        self._datastore = datastore
        self._inflight = inflight
        self._is_ready = is_ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the bound port (`port` 0 takes a free one). Raises `OSError`.

        Without `tls` the port is plain text.
        """
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._show_metrics),
                web.get("/healthz", self._show_health),
                web.get("/readyz", self._show_readiness),
                web.get("/endpoints", self._show_endpoints),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port; fine to call when it never opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        body = self._metrics.render() if self._page is None else await self._page()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _show_readiness(self, _request: web.Request) -> web.Response:
        if self._is_ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready\n")

    async def _show_endpoints(self, _request: web.Request) -> web.Response:
        rows = [self._describe(candidate) for candidate in self._datastore.snapshot().candidates]
        body = msgspec.json.encode({"endpoints": rows})
        return web.Response(body=body, content_type="application/json")

    def _describe(self, candidate: Candidate) -> dict[str, Any]:
        """`metrics` is null while the endpoint's load is unknown."""
        endpoint, metrics = candidate.endpoint, candidate.metrics
        return {
            "name": endpoint.name,
            "namespace": endpoint.namespace,
            "address": endpoint.host_port,
            "labels": dict(endpoint.labels),
            "inflight_requests": self._inflight.requests(candidate.key),
            "metrics": msgspec.to_builtins(metrics),
        }
