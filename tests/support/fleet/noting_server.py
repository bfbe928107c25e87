"""An HTTP server that notes what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=1, auto_decompress=False
        )
        self.address = await listening(runner)
        try:
            yield self
        finally:
            await runner.cleanup()


async def listening(runner: web.AppRunner) -> str:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"{host}:{port}"
