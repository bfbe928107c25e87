"""The HTTP port for people and monitoring: metrics, health, the pool, the queues, the decisions,
the configuration, and a page that shows it all.

Unless it is protected (`authorizing`) it asks nobody who they are, so it listens on the loopback
address unless told otherwise, and nothing can be changed through it.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from picker.admin.authorizing import Authorize, authorizing
from picker.admin.empty_source import EmptySource
from picker.admin.endpoint_routes import EndpointRoutes
from picker.admin.guarding import HostCheck, add_security_headers, guarding
from picker.admin.monitoring_routes import MonitoringRoutes
from picker.admin.page_routes import PageRoutes
from picker.admin.request_routes import RequestRoutes
from picker.admin.sampling import HistorySampler
from picker.admin.sources import AdminSource
from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.metrics import PickerMetrics

SHUTDOWN_SECONDS = 1.0


class AdminServer:
    """Owns the port, and the pool's last two minutes."""

    def __init__(
        self,
        metrics: PickerMetrics,
        datastore: Datastore,
        inflight: InflightLoad,
        is_ready: Callable[[], bool],
        page: Callable[[], Awaitable[bytes]] | None = None,
        source: AdminSource | None = None,
    ) -> None:
        """`page` renders `/metrics` where more than `metrics` is to be told.

        Without a `source` there are no queues and decisions.
        """

        async def rendered() -> bytes:
            return metrics.render()

        known = source or EmptySource()
        self._sampler = HistorySampler(datastore, inflight, known)
        endpoints = EndpointRoutes(datastore, inflight, known, self._sampler.history)
        self._routes = [
            *MonitoringRoutes(page or rendered, is_ready, known.pool_problem).routes(),
            *endpoints.routes(),
            *RequestRoutes(known).routes(),
            *PageRoutes().routes(),
        ]
        self._check = HostCheck()
        self._authorize: Authorize | None = None
        self._failures = metrics.admin_failures_total
        self._runner: web.AppRunner | None = None

    def protect(self, authorize: Authorize) -> None:
        """Answer only those that it lets through; to be called before `start`."""
        self._authorize = authorize

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the bound port (`port` 0 takes a free one). Raises `OSError`.

        Without `tls` the port is plain text.
        """
        application = web.Application(middlewares=[guarding(self._check, self._failures)])
        if self._authorize is not None:
            application.middlewares.append(authorizing(self._authorize))
        application.add_routes(self._routes)
        application.on_response_prepare.append(add_security_headers)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        self._check.bound(host, [str(address[0]) for address in runner.addresses])
        return int(runner.addresses[0][1])

    async def watch(self) -> None:
        """Keep the pool's last two minutes, until cancelled."""
        await self._sampler.run()

    async def sample(self) -> None:
        """Look at the pool now: what `watch` does once a second."""
        await self._sampler.sample()

    async def stop(self) -> None:
        """Close the port; fine to call when it never opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
