"""The HTTP port for people and monitoring: metrics, health, the pool, the queues, the decisions,
the configuration, and a page that shows it all.

Unless it is protected (`authorizing`) it asks nobody who they are, so it listens on the loopback
address unless told otherwise, and nothing can be changed through it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence

from aiohttp import web

from picker.admin.authorizing import Authorize, authorizing
from picker.admin.guarding import HostCheck, add_security_headers, guarding
from picker.admin.page_names import PageNames
from picker.admin.pool_face import PoolFace
from picker.metrics.series import Counter

SHUTDOWN_SECONDS = 1.0


class AdminServer:
    """Owns the port. `failures` counts the requests that an unforeseen error kept from being
    answered, by page.
    """

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        faces: Sequence[PoolFace],
        failures: Counter,
        names: PageNames | None = None,
    ) -> None:
        """`routes` are all there is, of the pools that `faces` tell of; `names` is what their pages
        are called.
        """
        self._routes, self._faces, self._failures = routes, faces, failures
        self._names = names or PageNames()
        self._check = HostCheck()
        self._authorize: Authorize | None = None
        self._runner: web.AppRunner | None = None

    @classmethod
    def of_one(cls, face: PoolFace, is_ready: Callable[[], bool]) -> AdminServer:
        """That of a picker of one pool."""
        return cls(face.routes(is_ready), [face], face.metrics.admin_failures_total)

    def protect(self, authorize: Authorize) -> None:
        """Answer only those that it lets through; to be called before `start`."""
        self._authorize = authorize

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the bound port (`port` 0 takes a free one). Raises `OSError`.

        Without `tls` the port is plain text.
        """
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
        self._check.bound(host, [str(address[0]) for address in runner.addresses])
        return int(runner.addresses[0][1])

    async def watch(self) -> None:
        """Keep the pools' last two minutes, until cancelled."""
        await asyncio.gather(*(face.sampler.run() for face in self._faces))

    async def sample(self) -> None:
        """Look at the pools now: what `watch` does once a second."""
        for face in self._faces:
            await face.sampler.sample()

    async def stop(self) -> None:
        """Close the port; fine to call when it never opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
