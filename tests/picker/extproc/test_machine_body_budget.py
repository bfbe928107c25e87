"""Room for request bodies that still arrive: bounded over all streams, and given back once."""

from __future__ import annotations

from typing import Any

import pytest
from h2 import events

from picker.errors import DropReason
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Ending, Finish
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.machine.stream import StreamMachine
from picker.rpc.budget import ByteBudget
from picker.rpc.call import Call
from picker.rpc.calls import Abort, Metadata, Status
from picker.types import FinishCause
from tests.support.picker.http2_peer import PATH, Peer, connected, prefix, settled
from tests.support.picker.stream_ways import HEADERS, REFUSAL, feed

BODY = m.RequestBody(b"{}", end_of_stream=True)
LARGE = bytes(100_000)


def roomy(max_bytes: int) -> tuple[ByteBudget, list[StreamMachine]]:
    bodies = ByteBudget(max_bytes)
    return bodies, [StreamMachine(StreamSettings(budget=bodies)) for _ in range(2)]


def test_a_body_that_finds_no_room_while_others_arrive_is_refused() -> None:
    bodies, (first, second) = roomy(100)
    feed(first, m.RequestHeaders(HEADERS), m.RequestBody(bytes(60)))
    feed(second, m.RequestHeaders(HEADERS), m.RequestBody(bytes(40)))
    finish, reply = feed(second, m.RequestBody(b"1"))
    assert finish == Finish(FinishCause.REFUSED, 429)
    assert reply.headers == (
        ("x-llm-d-request-dropped-reason", "rejected-saturated"),
        ("retry-after", "1"),
        ("content-type", "application/json"),
    )
    assert bodies.held_bytes == 60
    assert feed(second, m.RequestBody(bytes(1000), end_of_stream=True)) == []
    assert feed(first, m.RequestBody(bytes(40)), m.RequestTrailers()) != []
    assert bodies.held_bytes == 0


def test_a_body_that_comes_at_once_needs_no_room() -> None:
    bodies, (first, second) = roomy(0)
    assert isinstance(feed(first, m.RequestHeaders(HEADERS), BODY)[0], m.Route)
    buffered = m.RequestHeaders(HEADERS, request_body=BodyMode.BUFFERED)
    assert isinstance(feed(second, buffered, BODY)[0], m.Route)
    assert bodies.held_bytes == 0


@pytest.mark.parametrize(
    "end",
    [
        BODY,
        m.RequestTrailers(),
        m.ResponseHeaders(408),
        m.RequestBody(bytes(1000)),
        REFUSAL,
        DropReason.EVICTED,
        *map(m.Closed, Ending),
    ],
    ids=str,
)
def test_the_room_of_a_body_is_given_back_once_however_it_ends(end: object) -> None:
    bodies = ByteBudget(2000)
    machine = StreamMachine(StreamSettings(max_body_bytes=500, budget=bodies))
    feed(machine, m.RequestHeaders(HEADERS), m.RequestBody(bytes(200)), m.RequestBody(bytes(100)))
    assert bodies.held_bytes == 300
    feed(machine, end)
    assert bodies.held_bytes == 0
    feed(machine, m.Closed(Ending.CANCELLED))
    assert bodies.held_bytes == 0


# On the way to the machine


class Reader:
    def __init__(self, *, takes_all: bool) -> None:
        self.takes_all = takes_all
        self.read: list[int] = []
        self.asked = 0
        self.call: Any = None

    def __call__(self, call: Call, metadata: Metadata) -> Reader:
        self.call = call
        return self

    def message(self, data: bytes) -> None:
        self.read.append(len(data))

    def end_of_messages(self) -> None:
        self.call.end()

    def refuses_large_message(self) -> bool:
        self.asked += 1
        if not self.takes_all:
            self.call.end()
        return not self.takes_all

    def abort(self, why: Abort) -> None:
        pass


async def upload(peer: Peer, stream_id: int, size: int) -> int:
    """Send as much of a message as the peer's window allows; return how much that was."""
    left = prefix(bytes(size)) + bytes(size)
    sent = 0
    while left and (room := min(peer.http2.local_flow_control_window(stream_id), 16_384)):
        peer.http2.send_data(stream_id, left[:room])
        sent += len(left[:room])
        left = left[room:]
        await peer.settle()
        if any(event.stream_id == stream_id for event in peer.saw(events.StreamReset)):
            break
    return sent


async def test_a_large_message_needs_room_until_it_is_whole() -> None:
    bodies, reader = ByteBudget(3_000_000), Reader(takes_all=False)
    peer = await settled({}, 2**23, {PATH: reader}, budget=bodies)
    first, second = peer.call(), peer.call()
    half = prefix(bytes(2_000_000)) + LARGE
    for at in range(0, len(half), 16_384):
        peer.http2.send_data(first, half[at : at + 16_384])
    await peer.settle()
    assert bodies.held_bytes == 2_000_000
    assert await upload(peer, second, 2_000_000) <= 2 * 16_384
    assert (reader.read, reader.asked) == ([], 1)
    assert peer.fields(second)["grpc-status"] == "0"
    assert bodies.held_bytes == 2_000_000
    for _ in range(19):
        for at in range(0, len(LARGE), 16_384):
            peer.http2.send_data(first, LARGE[at : at + 16_384])
        await peer.settle()
    assert reader.read == [2_000_000]
    assert bodies.held_bytes == 0


async def test_a_receiver_that_takes_it_gets_its_message_without_room() -> None:
    bodies, reader = ByteBudget(1000), Reader(takes_all=True)
    peer = await settled({}, 2**23, {PATH: reader}, budget=bodies)
    size = 3 * 2**20  # more than a window
    assert await upload(peer, peer.call(), size) == size + 5
    assert (reader.read, reader.asked) == ([size], 1)
    assert bodies.held_bytes == 0


@pytest.mark.parametrize("end", ["reset", "lost", "end of stream", "deadline"])
async def test_the_room_of_half_a_message_is_given_back(end: str) -> None:
    bodies = ByteBudget(2_000_000)
    peer = connected({}, 2**23, {PATH: Reader(takes_all=False)}, budget=bodies)
    stream_id = peer.call()
    peer.http2.send_data(stream_id, prefix(bytes(1_000_000)) + bytes(10_000))
    await peer.settle()
    assert bodies.held_bytes == 1_000_000
    if end == "reset":
        peer.http2.reset_stream(stream_id)
    elif end == "lost":
        peer.connection.connection_lost(ConnectionResetError())
    elif end == "end of stream":
        peer.http2.end_stream(stream_id)
    else:
        peer.connection.calls[0].break_off(Abort.CANCELLED, Status.DEADLINE_EXCEEDED, "late")
    await peer.settle()
    assert bodies.held_bytes == 0
