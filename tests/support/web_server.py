"""An HTTP server on a free port, and one that notes what it was asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def for_all_paths(handle: Handler) -> web.Application:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", handle)
    return application


def runner_of(application: web.Application) -> web.AppRunner:
    return web.AppRunner(
        application,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        auto_decompress=False,
        access_log=None,
    )


@asynccontextmanager
async def serving(
    application: web.Application, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve while the block runs, and yield the port."""
    runner = runner_of(application)
    try:
        yield await listening(runner, tls)
    finally:
        await runner.cleanup()


async def listening(runner: web.AppRunner, tls: ssl.SSLContext | None = None) -> int:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    return int(runner.addresses[0][1])


class Server:
    """Notes what it was asked; `behave` answers."""

    def __init__(self, behave: Handler) -> None:
        self.behave = behave
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.address = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, str(request.rel_url), headers, await request.read()))
        self.arrived.set()
        try:
            return await self.behave(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        async with serving(for_all_paths(self.handle)) as port:
            self.address = f"127.0.0.1:{port}"
            yield self
