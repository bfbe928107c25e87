"""An HTTP/1.1 endpoint of the suite."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

from conformance.echo.answers import (
    ECHO,
    SERVED_BY,
    STREAM,
    Received,
    events,
    metrics_page,
    reply_to,
)

STREAM_EVENTS = 6
_MAX_BODY_BYTES = 64 * 2**20
_UNSEEN = ("/metrics", "/health", "/v1/models")


class EchoServer:
    """One endpoint. It may vanish, and come back at its address.

    `received` are the requests of clients so far. A stream (`x-echo: stream`) sends its first
    event, then waits for `go_on`. `is_full` makes its metrics report an overload.
    """

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self.received: list[Received] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.streams_begun = 0
        self.is_full = False
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        """The address by which pickers name it."""
        return f"{self.address}:{self.port}"

    @property
    def is_up(self) -> bool:
        """True while the server accepts connections."""
        return self._runner is not None

    async def start(self) -> None:
        """Listen, unless it does. Raises OSError where the address cannot be had."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.address, self.port, reuse_address=True).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Refuse connections, and cut those there are."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(text=metrics_page(self.is_full))
        body = await request.read()
        received = Received(
            self.endpoint,
            request.method,
            request.path,
            tuple((key.lower(), value) for key, value in request.headers.items()),
            body,
            "http/1.1",
        )
        if request.path not in _UNSEEN:
            self.received.append(received)
        if received.header(ECHO) == STREAM:
            return await self._stream(request)
        reply = reply_to(received)
        return web.Response(body=reply.body, headers=dict(reply.headers))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        headers: Mapping[str, str] = {"content-type": "text/event-stream", SERVED_BY: self.endpoint}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        first, *others = events(STREAM_EVENTS, self.endpoint)
        with suppress(ConnectionResetError):  # clients may leave
            await response.write(first)
            self.streams_begun += 1
            for event in others:
                await self.go_on.wait()
                await response.write(event)
            await response.write_eof()
        return response
