"""A fixed address in front of a server that moves."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from fleet.envoy.settings import SocketAddress
from fleet.errors import FleetError
from fleet.proxy.relay import Relay
from tests.support.local_ports import free_port

HOST = "127.0.0.1"
LARGE = bytes(range(256)) * 20_000  # more than sockets buffer


@contextlib.asynccontextmanager
async def server(name: bytes) -> AsyncIterator[SocketAddress]:
    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(name)
            writer.write(await reader.read())
            await writer.drain()
        writer.close()

    serving = await asyncio.start_server(repeat, HOST, 0)
    async with serving:
        yield SocketAddress(HOST, serving.sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def relay_to(target: SocketAddress) -> AsyncIterator[tuple[Relay, int]]:
    port = free_port()
    relay = Relay(SocketAddress(HOST, port), target)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(relay.run())
        yield relay, port
        running.cancel()


async def sent(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.writelines(pieces)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("pieces", [(), (b"GET / ",), (LARGE, b"end")], ids=["none", "few", "many"])
async def test_bytes_pass_both_ways_as_they_are(pieces: tuple[bytes, ...]) -> None:
    async with server(b"a:") as target, relay_to(target) as (_, port):
        assert await sent(port, *pieces) == b"a:" + b"".join(pieces)


async def test_new_connections_go_to_the_new_server_and_old_ones_stay() -> None:
    async with server(b"old:") as old, server(b"new:") as new, relay_to(old) as (relay, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        assert await reader.readexactly(4) == b"old:"
        relay.target = new
        assert await sent(port, b"2") == b"new:2"
        writer.write(b"1")
        writer.write_eof()
        assert await reader.read() == b"1"
        writer.close()


async def test_a_server_that_returns_is_found() -> None:
    away = SocketAddress(HOST, free_port())
    async with relay_to(away) as (relay, port):
        assert await sent(port) == b""
        async with server(b"back:") as relay.target:
            assert await sent(port, b"3") == b"back:3"


async def test_an_early_client_disconnect_does_no_harm() -> None:
    async with server(b"a:") as target, relay_to(target) as (_, port):
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(LARGE)
        writer.transport.abort()
        assert await sent(port, b"4") == b"a:4"


async def test_its_end_closes_every_connection() -> None:
    async with server(b"a:") as target:
        async with relay_to(target) as (_, port):
            reader, writer = await asyncio.open_connection(HOST, port)
            assert await reader.readexactly(2) == b"a:"
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FleetError, match=f"cannot listen on {HOST}:{port}: Address already"):
            Relay(SocketAddress(HOST, port), SocketAddress(HOST, port))
