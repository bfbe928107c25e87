"""The real Envoy: what a decision may ask for, eviction, lost streams, and a picker's limits."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import DropReason
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.server import build_server
from picker.rpc.budget import ByteBudget
from picker.rpc.connection import WASTE_BURST, GrpcConnection
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
from picker.types import FinishCause, Metadata, RawRequest, RouteDecision
from tests.support.fleet.envoy_front import NEEDS_ENVOY, Asking, Front, envoy_front
from tests.support.picker.http_exchange import Ask, exchange
from tests.support.picker.odd_endpoint import EVENTS, OddEndpoint, odd_endpoint
from tests.support.picker.random_taps import HoldingTap
from tests.support.picker.recording_director import RecordingDirector

pytestmark = NEEDS_ENVOY

LISTENERS = {
    "duplex": Asking(),
    "buffered": Asking("BUFFERED", "BUFFERED"),
    "streamed": Asking("BUFFERED", "STREAMED"),
    "asked": Asking("BUFFERED", "NONE", allow_override=True),
    "none": Asking("BUFFERED", "NONE"),
}
EACH = pytest.mark.parametrize("name", list(LISTENERS))
LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with envoy_front(LISTENERS) as running:
        yield running


@dataclass
class Scripted:
    decision: RouteDecision
    evict: Callable[[DropReason], None] | None = None
    ends: asyncio.Queue[tuple[FinishCause, int | None]] = field(default_factory=asyncio.Queue)

    def begin(self, evict: Callable[[DropReason], None]) -> Scripted:
        self.evict = evict
        return self

    def decides_at_once(self, raw: RawRequest) -> bool:
        return True

    async def route(self, raw: RawRequest) -> RouteDecision:
        return self.decision

    def finish(self, cause: FinishCause, status: int | None = None, *_: object) -> None:
        self.ends.put_nowait((cause, status))

    async def end(self) -> tuple[FinishCause, int | None]:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.ends.get()


@asynccontextmanager
async def picking(
    front: Front, *, marks: bool = False, **decision: object
) -> AsyncIterator[tuple[Scripted, OddEndpoint]]:
    async with odd_endpoint() as endpoint:
        script = Scripted(replace(RouteDecision(endpoint.host_port), **decision))  # type: ignore[arg-type]
        options = ServerOptions(host=str(front.picker_socket))
        # The mark on responses shows which of them have come through the picker.
        settings = StreamSettings(max_headers=30, max_header_bytes=4_000, conformance=marks)
        server = build_server(script, options=options, settings=settings)
        await server.start()
        try:
            yield script, endpoint
        finally:
            await server.stop(1)


class Doubling(HoldingTap):
    """Sends every byte twice, some of them late."""

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        return super().body(bytes(byte for byte in data for _ in range(2)), is_last)


@pytest.mark.parametrize("name", ["duplex", "buffered", "streamed", "asked"])
@pytest.mark.parametrize("path", ["/echo", "/events", "/trailers"])
async def test_a_tap_may_change_lengths_and_hold_bytes_back(
    front: Front, name: str, path: str
) -> None:
    # In lockstep nothing can be sent after the last piece but the trailers.
    tap = Doubling(0 if (name, path) == ("streamed", "/trailers") else 1_000, None)
    async with picking(front, response=tap, needs_response_body=True) as (script, endpoint):
        answer = await exchange(front.ports[name], Ask(path, [b"abc" * 50_000]))
        assert (answer.status, answer.complete) == (200, True), answer.body[:100]
        assert answer.headers["x-tapped"] == "yes"
        body = answer.body
        plain = body[::2]
        assert body[1::2] == plain
        if path != "/events":
            assert plain == b"abc" * 50_000
        assert endpoint.got[-1].body == b"abc" * 50_000
        assert await script.end() == (FinishCause.COMPLETED, 200)


@EACH
async def test_a_tap_that_fails_leaves_the_response_whole(front: Front, name: str) -> None:
    tap = HoldingTap(5, 2)
    async with picking(front, response=tap, needs_response_body=True) as (script, _):
        answer = await exchange(front.ports[name], Ask("/echo", [b"abc" * 50_000]))
        assert (answer.complete, answer.body) == (True, b"abc" * 50_000)
        assert await script.end() == (FinishCause.COMPLETED, 200)


@pytest.mark.parametrize("name", ["duplex", "buffered", "streamed"])
async def test_metadata_of_decision_and_response_reaches_envoy(front: Front, name: str) -> None:
    scores: Metadata = {"envoy.lb": {"x-scores": {"10.0.0.1:8000": 0.5}}}
    path = f"/echo?metadata={name}"
    async with picking(front, metadata=scores, response=HoldingTap(0, None)) as (_, endpoint):
        await exchange(front.ports[name], Ask(path, [b"body"]))
        entry = json.loads(await logged(front, path))
        assert entry.pop("x-cost") in (0, 4)  # the end of the stream may come alone
        assert entry == {
            "x-gateway-destination-endpoint": endpoint.host_port,
            "x-scores": {"10.0.0.1:8000": 0.5},
        }


async def logged(front: Front, path: str) -> str:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:  # until Envoy has written it down
            for line in read_lines(front.access_log):
                if line.startswith(f"{path} "):
                    return line.removeprefix(f"{path} ")
            await asyncio.sleep(0.05)


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@EACH
async def test_a_response_that_is_none_of_ours_passes_by(front: Front, name: str) -> None:
    async with picking(front, marks=True, skip_response=True) as (script, _):
        body = b"abc" * 50_000
        for path in ("/echo", "/trailers", "/trailers", "/trailers", "/events"):
            answer = await exchange(front.ports[name], Ask(path, [body]))
            assert (answer.status, answer.complete) == (200, True)
            assert answer.body == (b"".join(EVENTS) if path == "/events" else body)
            assert ("x-went-into-resp-headers" in answer.headers) is (name == "duplex")
            assert (await script.end())[0] is FinishCause.SKIPPED
        trailed = Ask("/trailers", [b"x"], trailers=(("x-behind", "it"),))
        answer = await exchange(front.ports[name], trailed)
        assert (answer.body, answer.trailers) == (b"x", {"x-after": "all"})


@EACH
async def test_an_evicted_request_is_answered_by_the_picker(front: Front, name: str) -> None:
    async with picking(front) as (script, endpoint):
        asking = asyncio.ensure_future(exchange(front.ports[name], Ask("/hang", [b"{}"])))
        await endpoint.arrived.wait()
        script.evict(DropReason.EVICTED)
        answer = await asking
        assert answer.status == 429
        assert json.loads(answer.body)["error"]["type"] == "RateLimitError"
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-llm-d-request-dropped-reason"] == "evicted"
        assert await script.end() == (FinishCause.EVICTED, 429)


@pytest.mark.parametrize("name", ["duplex", "streamed", "none"])
async def test_a_stream_that_is_evicted_breaks_off(front: Front, name: str) -> None:
    """The client has its status already and must not take half a response for a whole one."""
    async with picking(front) as (script, _):
        ask = Ask("/half", [b"{}"])
        asking = asyncio.ensure_future(exchange(front.ports[name], ask))
        await ask.begun.wait()
        script.evict(DropReason.EVICTED)
        answer = await asking
        assert not answer.complete
        assert (await script.end())[0] is FinishCause.EVICTED


@EACH
@pytest.mark.parametrize(
    "headers", [[(f"x-{n}", "1") for n in range(40)], [("x-large", "y" * 5_000)]]
)
async def test_headers_beyond_the_limits_are_a_431(
    front: Front, name: str, headers: list[tuple[str, str]]
) -> None:
    async with picking(front) as (script, endpoint):
        for ask in (
            Ask("/echo", [b"body"], headers=headers),
            Ask("/echo", method="GET", headers=headers),
        ):
            answer = await exchange(front.ports[name], ask)
            assert answer.status == 431
            assert b"more than 30 headers" in answer.body or b"4000 bytes" in answer.body
            assert await script.end() == (FinishCause.REFUSED, 431)
        assert endpoint.got == []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, "/hang") for name in LISTENERS),
        # A buffered response has not begun for the client while it has not ended.
        *((name, "/half") for name in LISTENERS if name != "buffered"),
    ],
)
async def test_a_client_that_leaves_ends_its_request(front: Front, name: str, path: str) -> None:
    async with picking(front) as (script, endpoint):
        ask = Ask(path, [b"{}"])
        asking = asyncio.ensure_future(exchange(front.ports[name], ask))
        await (endpoint.arrived if path == "/hang" else ask.begun).wait()
        asking.cancel()
        cause, _ = await script.end()
        assert cause in (FinishCause.CLIENT_GONE, FinishCause.COMPLETED)
        if path == "/hang":
            assert cause is FinishCause.CLIENT_GONE


SMALL, LARGE = [b'{"model": "m"}'], [bytes(1_000_000)]


@asynccontextmanager
async def serving(front: Front, **options: Any) -> AsyncIterator[tuple[GrpcServer, list[Any]]]:
    async with odd_endpoint() as endpoint:

        async def route(raw: RawRequest) -> RouteDecision:
            return RouteDecision(endpoint.host_port)

        source = RecordingDirector(route)
        listening = ServerOptions(host=str(front.picker_socket), max_message_bytes=2**24, **options)
        server = build_server(source, options=listening)
        await server.start()
        try:
            yield server, source.exchanges
        finally:
            await server.stop(1)


@pytest.mark.parametrize("name", ["duplex", "none"])
async def test_no_request_fails_while_idle_connections_are_closed(front: Front, name: str) -> None:
    """Envoy keeps connections for an hour; here each ends as soon as it has no call."""
    connections: set[GrpcConnection] = set()
    async with serving(front, idle_seconds=0.0001) as (server, exchanges):
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


async def test_clients_that_all_leave_at_once_are_no_attack(front: Front) -> None:
    """Envoy opens and gives up one call for each client."""
    async with serving(front) as (server, exchanges):
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


@pytest.mark.parametrize("name", ["duplex", "none"])
async def test_a_body_without_room_gets_its_status_and_the_others_go_on(
    front: Front, name: str
) -> None:
    """Envoy sends a body that it keeps as one message, which is refused as soon as it has begun."""
    bodies = ByteBudget(100_000)
    async with serving(front, budget=bodies) as (_, exchanges):
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
