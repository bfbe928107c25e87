"""Room for request bodies that still arrive: bounded over all streams, and given back once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from h2 import events
from h2_peer import PATH, Peer
from pump_wire import RESPONSE_END, RESPONSE_HEADERS, Wire, stream
from stream_ways import HEADERS, REFUSAL, feed

from picker.errors import DropReason, RefusedError
from picker.extproc.body_budget import BodyBudget, no_room
from picker.extproc.messages import (
    BodyMode,
    Closed,
    Dropped,
    Ending,
    Evicted,
    Finish,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseHeaders,
    Route,
    SendImmediate,
)
from picker.extproc.request_phase import Limits
from picker.extproc.stream import StreamMachine
from picker.rpc.calls import Read, Write
from picker.rpc.framing import prefix
from picker.rpc.http2_frames import FrameEngine
from picker.rpc.http2_library import LibraryEngine
from picker.types import FinishCause

BODY = RequestBody(b"{}", end_of_stream=True)
LARGE = bytes(100_000)


def roomy(max_bytes: int) -> tuple[BodyBudget, list[StreamMachine]]:
    """Two streams that share room for so many bytes."""
    bodies = BodyBudget(max_bytes)
    return bodies, [StreamMachine(Limits(bodies=bodies)) for _ in range(2)]


def test_a_body_that_finds_no_room_while_others_arrive_is_refused() -> None:
    """With the status and the reason of a full queue; what comes after it is ignored."""
    bodies, (first, second) = roomy(100)
    feed(first, RequestHeaders(HEADERS), RequestBody(bytes(60)))
    feed(second, RequestHeaders(HEADERS), RequestBody(bytes(40)))
    finish, reply = feed(second, RequestBody(b"1"))
    assert finish == Finish(FinishCause.REFUSED, 429)
    assert isinstance(reply, SendImmediate)
    assert reply.headers == (
        ("x-llm-d-request-dropped-reason", "rejected-saturated"),
        ("retry-after", "1"),
    )
    assert bodies.held_bytes == 60
    assert feed(second, RequestBody(bytes(1000), end_of_stream=True)) == []
    assert feed(first, RequestBody(bytes(40)), RequestTrailers()) != []
    assert bodies.held_bytes == 0


def test_a_body_that_comes_at_once_needs_no_room() -> None:
    """It arrives no more; nor does one that a proxy has kept to its end."""
    bodies, (first, second) = roomy(0)
    assert isinstance(feed(first, RequestHeaders(HEADERS), BODY)[0], Route)
    buffered = RequestHeaders(HEADERS, request_body=BodyMode.BUFFERED)
    assert isinstance(feed(second, buffered, BODY)[0], Route)
    assert bodies.held_bytes == 0


@pytest.mark.parametrize(
    "end",
    [
        BODY,
        RequestTrailers(),
        ResponseHeaders(408),
        RequestBody(bytes(1000)),
        Dropped(REFUSAL),
        Evicted(DropReason.EVICTED),
        *map(Closed, Ending),
    ],
    ids=str,
)
def test_the_room_of_a_body_is_given_back_once_however_it_ends(end: object) -> None:
    """Complete, answered by the proxy, too large, refused, evicted or cut off."""
    bodies = BodyBudget(2000)
    machine = StreamMachine(Limits(max_body_bytes=500, bodies=bodies))
    feed(machine, RequestHeaders(HEADERS), RequestBody(bytes(200)), RequestBody(bytes(100)))
    assert bodies.held_bytes == 300
    feed(machine, end)
    assert bodies.held_bytes == 0
    feed(machine, Closed(Ending.CANCELLED))
    assert bodies.held_bytes == 0


# On the way to the machine


@pytest.fixture(params=[FrameEngine, LibraryEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both HTTP/2 engines in turn; they promise the same."""
    Peer.engine, before = request.param, Peer.engine
    yield
    Peer.engine = before


class Reader:
    """A method that writes down what it reads, and stops or reads on where there is no room."""

    def __init__(self, *, reads_on: bool) -> None:
        self.reads_on = reads_on
        self.read: list[int] = []
        self.warnings = 0

    async def __call__(self, read: Read, write: Write) -> None:
        while True:
            try:
                message = await read()
            except RefusedError:
                self.warnings += 1
                if self.reads_on:
                    continue
                return
            if message is None:
                return
            self.read.append(len(message))


async def upload(peer: Peer, stream_id: int, size: int) -> int:
    """Send as much of a message as the peer is let; how much that was."""
    left = prefix(bytes(size)) + bytes(size)
    sent = 0
    while left and (room := min(peer.http2.local_flow_control_window(stream_id), 16_384)):
        peer.http2.send_data(stream_id, left[:room])
        sent += len(left[:room])
        left = left[room:]
        peer.push()
        await peer.settle()
        if any(event.stream_id == stream_id for event in peer.saw(events.StreamReset)):
            break
    return sent


@pytest.mark.usefixtures("engine")
async def test_a_large_message_needs_room_until_it_is_whole() -> None:
    """A proxy that keeps a body shows it as one; what does not fit is not even received."""
    bodies, reader = BodyBudget(3_000_000), Reader(reads_on=False)
    peer = Peer({PATH: reader}, 2**23, bodies=bodies)
    peer.connect()
    await peer.settle()
    first, second = peer.call(), peer.call()
    half = prefix(bytes(2_000_000)) + LARGE
    for at in range(0, len(half), 16_384):
        peer.http2.send_data(first, half[at : at + 16_384])
    peer.push()
    await peer.settle()
    assert bodies.held_bytes == 2_000_000
    assert await upload(peer, second, 2_000_000) <= 2 * 16_384
    assert (reader.read, reader.warnings) == ([], 1)
    assert peer.fields(second)["grpc-status"] == "0"
    assert bodies.held_bytes == 2_000_000
    for _ in range(19):
        for at in range(0, len(LARGE), 16_384):
            peer.http2.send_data(first, LARGE[at : at + 16_384])
        peer.push()
        await peer.settle()
    assert reader.read == [2_000_000]
    assert bodies.held_bytes == 0


@pytest.mark.usefixtures("engine")
async def test_a_reader_that_reads_on_gets_its_message_without_room() -> None:
    """As one does whose message is no body of a request; it counts all the same."""
    bodies, reader = BodyBudget(1000), Reader(reads_on=True)
    peer = Peer({PATH: reader}, 2**23, bodies=bodies)
    peer.connect()
    await peer.settle()
    size = 3 * 2**20  # more than a window
    assert await upload(peer, peer.call(), size) == size + 5
    assert (reader.read, reader.warnings) == ([size], 1)
    assert bodies.held_bytes == 0


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("end", ["reset", "lost", "end of stream", "deadline"])
async def test_the_room_of_half_a_message_is_given_back(end: str) -> None:
    """Whatever becomes of its stream."""
    bodies = BodyBudget(2_000_000)
    peer = Peer({PATH: Reader(reads_on=False)}, 2**23, bodies=bodies)
    peer.connect()
    stream_id = peer.call()
    peer.http2.send_data(stream_id, prefix(bytes(1_000_000)) + bytes(10_000))
    peer.push()
    await peer.settle()
    assert bodies.held_bytes == 1_000_000
    if end == "reset":
        peer.http2.reset_stream(stream_id)
    elif end == "lost":
        peer.connection.connection_lost(ConnectionResetError())
    elif end == "end of stream":
        peer.http2.end_stream(stream_id)
    else:
        peer.connection._expire(peer.connection._streams[stream_id])
    peer.push()
    await peer.settle()
    assert bodies.held_bytes == 0


def headers_in(mode: int) -> bytes:
    """The headers of a request whose bodies are shown in that mode."""
    modes = pb.ProtocolConfiguration(request_body_mode=mode)
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), protocol_config=modes)
    return bytes(message.SerializeToString())


async def test_the_pump_answers_a_body_without_room(director: Any) -> None:
    """The client is told before the body is there; then the stream ends in order."""
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(headers_in(2))
        assert await wire.reply() == "request_headers"
        wire.send(no_room())
        assert await wire.reply() == "immediate_response"
        await task
    assert source.exchanges[0].finished.result() == (FinishCause.REFUSED, 429, None)


async def test_a_response_is_not_broken_off_for_want_of_room(director: Any) -> None:
    """Room is for requests that are to come."""
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(no_room(), RESPONSE_HEADERS)
        assert await wire.reply() == "response_headers"
        wire.send(no_room(), RESPONSE_END)
        assert await wire.reply() == "response_body"
        wire.send(None)
        await task
