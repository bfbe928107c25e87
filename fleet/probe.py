"""One small HTTP request to one of our own processes, over TCP or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from fleet.envoy.settings import Address, SocketAddress

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer."""

    status: int
    body: bytes


class NoReplyError(Exception):
    """Nobody listens, or what answers does not speak HTTP, or it takes too long."""


async def request(
    address: Address, path: str, method: str = "GET", timeout_seconds: float = 2.0
) -> Reply:
    """Send one request on a connection of its own. Raises `NoReplyError`."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _exchange(address, path, method)
    except (OSError, TimeoutError, h11.ProtocolError) as error:
        raise NoReplyError(str(error) or type(error).__name__) from error


async def _exchange(address: Address, path: str, method: str) -> Reply:
    if isinstance(address, SocketAddress):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    else:
        reader, writer = await asyncio.open_unix_connection(address.path)
    try:
        http = h11.Connection(h11.CLIENT)
        headers = [("host", "localhost"), ("connection", "close"), ("content-length", "0")]
        asked = h11.Request(method=method, target=path, headers=headers)
        writer.write((http.send(asked) or b"") + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        return await _reply(http, reader)
    finally:
        writer.close()


async def _reply(http: h11.Connection, reader: asyncio.StreamReader) -> Reply:
    status, body = 0, bytearray()
    while not isinstance(event := http.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(65_536))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
    return Reply(status, bytes(body))


async def until(
    address: Address, path: str, accept: Callable[[Reply], bool] = lambda reply: reply.status == 200
) -> Reply:
    """Ask again and again until an answer is acceptable; the caller limits the time."""
    last: list[Reply] = []

    async def is_accepted() -> bool:
        last[:] = [await request(address, path)]
        return accept(last[0])

    await until_true(is_accepted)
    return last[0]


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until `condition` holds; `NoReplyError` counts as no. The caller limits
    the time.
    """
    while True:
        with contextlib.suppress(NoReplyError):
            if await condition():
                return
        await asyncio.sleep(POLL_SECONDS)
