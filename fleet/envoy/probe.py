"""One small HTTP request to a server, over TCP or a unix socket."""

import asyncio
import contextlib
import math
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from fleet.envoy.settings import Address, SocketAddress

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ProbeReply:
    status: int
    body: bytes


class NoReplyError(Exception): ...


async def request(
    address: Address, path: str, method: str = "GET", timeout_seconds: float = 2.0
) -> ProbeReply:
    """Send one request on a connection of its own. Raises `NoReplyError`."""
    headers = [("host", "localhost"), ("connection", "close"), ("content-length", "0")]
    asked = h11.Request(method=method, target=path, headers=headers)
    try:
        async with asyncio.timeout(timeout_seconds):
            response, body = await exchange(address, asked)
    except (OSError, TimeoutError, h11.ProtocolError) as error:
        raise NoReplyError(str(error) or type(error).__name__) from error
    return ProbeReply(response.status_code, body)


async def exchange(
    address: Address,
    asked: h11.Request,
    *,
    tls: ssl.SSLContext | None = None,
    max_bytes: float = math.inf,
) -> tuple[h11.Response, bytes]:
    """Return the head and body of the answer to a request without a body. The caller limits the
    time. Raises `OSError` and `h11.ProtocolError`, also for more than `max_bytes`.
    """
    if isinstance(address, SocketAddress):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    else:
        reader, writer = await asyncio.open_unix_connection(address.path)
    try:
        http = h11.Connection(h11.CLIENT)
        writer.write((http.send(asked) or b"") + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        return await _answer(http, reader, max_bytes)
    finally:
        writer.close()


async def _answer(
    http: h11.Connection, reader: asyncio.StreamReader, max_bytes: float
) -> tuple[h11.Response, bytes]:
    response, body = None, bytearray()
    while not isinstance(event := http.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(65_536))
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_bytes:
                raise h11.RemoteProtocolError(f"an answer of more than {max_bytes} bytes")
    if response is None:
        raise h11.RemoteProtocolError("the connection was closed without an answer")
    return response, bytes(body)


async def until(
    address: Address,
    path: str,
    accept: Callable[[ProbeReply], bool] = lambda reply: reply.status == 200,
) -> ProbeReply:
    last: list[ProbeReply] = []

    async def is_accepted() -> bool:
        last[:] = [await request(address, path)]
        return accept(last[0])

    await until_true(is_accepted)
    return last[0]


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `condition` holds; `NoReplyError` counts as false. The caller limits the time."""
    while True:
        with contextlib.suppress(NoReplyError):
            if await condition():
                return
        await asyncio.sleep(POLL_SECONDS)
