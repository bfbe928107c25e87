"""Parts that the proxies share: server, streaming of an answer, errors."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web

from base.forwarding import Headers, forwarded_headers
from base.tracing import RequestTrace, Traced, Tracing, TracingError, build_tracing
from fleet.errors import FleetError
from worker.api.http.exchange import error_body
from worker.errors import RequestError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
TRACE: Final = web.RequestKey("trace", RequestTrace)  # of a request that has one

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def tracing_of(enabled: bool, traced: Traced) -> AsyncIterator[Tracing]:
    """Yield the tracer of a proxy; send the last spans at the end. Raises `FleetError`."""
    try:
        tracing = build_tracing(enabled, os.environ, traced)
    except TracingError as error:
        raise FleetError(str(error)) from error
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close)


def with_traces(handle: Handle, tracing: Tracing) -> Handle:
    """Span each request; `handle` finds its span under `TRACE`."""

    async def handled(request: web.Request) -> web.StreamResponse:
        trace = tracing.request(list(request.headers.items()))
        if trace is None:
            return await handle(request)
        request[TRACE] = trace
        status: int | None = None
        try:
            response = await handle(request)
            status = response.status
            return response
        finally:
            trace.end(status)

    return handled


def runner_of(handle: Handle, drain_seconds: float, reads: bool = False) -> web.AppRunner:
    """Create a server that handles every path. A request is cancelled when its client disconnects.
    With `reads`, compressed bodies are decompressed.
    """
    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.router.add_route("*", "/{path:.*}", handle)
    return web.AppRunner(
        application,
        handler_cancellation=True,
        shutdown_timeout=drain_seconds,
        access_log=None,
        auto_decompress=reads,
    )


async def serve(
    name: str,
    handle: Handle,
    address: tuple[str, int],
    drain_seconds: float,
    drains: Callable[[], None] = lambda: None,
    *,
    reads: bool = False,
    num_ports: int = 1,
) -> None:
    """Serve at `num_ports` ports, of which `address` has the first, until SIGTERM or SIGINT, then
    until all requests have ended or `drain_seconds` are over. Raises `FleetError`.
    """
    host, port = address
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = runner_of(handle, drain_seconds, reads)
    await runner.setup()
    try:
        for each in range(port, port + num_ports):
            await web.TCPSite(runner, host, each).start()
    except OSError as error:
        await runner.cleanup()
        where = f"--host {host} --port {port}"
        raise FleetError(f"cannot listen on {where}: {error.strerror or error}") from error
    sys.stdout.write(f"{name} ready on http://{host}:{port}\n")
    sys.stdout.flush()
    await stop.wait()
    drains()
    await runner.cleanup()


def error_answer(error: RequestError) -> web.Response:
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json"
    )


def unavailable(message: str) -> RequestError:
    return RequestError(message, status=503, type="ServiceUnavailableError")


async def begun(
    request: web.Request, source: aiohttp.ClientResponse, *dropped: str
) -> web.StreamResponse:
    headers = forwarded_headers(source.headers.items(), *dropped)
    response = web.StreamResponse(status=source.status, reason=source.reason, headers=headers)
    # `forwarded_headers` omits it, and without it aiohttp would write chunks.
    response.content_length = source.content_length
    await response.prepare(request)
    return response


async def pass_on(
    session: aiohttp.ClientSession,
    request: web.Request,
    url: str,
    data: bytes | aiohttp.StreamReader | None,
    headers: Headers,
) -> web.StreamResponse:
    """Answer as the server at `url` does, chunk by chunk, or with 503 when it does not answer."""
    response: web.StreamResponse | None = None
    try:
        async with session.request(
            request.method, url, data=data, headers=headers, allow_redirects=False
        ) as answer:
            response = await begun(request, answer)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, OSError) as error:
        if response is not None:
            raise  # the client's answer is cut off like the server's
        logger.warning("%s does not answer: %s", url, error)
        return error_answer(unavailable("no worker answers"))
