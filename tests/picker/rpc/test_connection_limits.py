"""The limits of a peer: handshakes, silence, waste."""

import asyncio
import struct

import pytest
from h2 import events
from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame

from picker.rpc.connection import DRAIN_SECONDS, KEEPALIVE_SECONDS, WASTE_BURST, WASTE_PER_SECOND
from picker.rpc.http2.frames import END_HEADERS, NUMBER, PREFACE, FrameType, frame
from picker.rpc.http2.headers import encode_fields
from picker.rpc.options import ServerOptions, TlsOptions
from picker.rpc.self_signed import self_signed
from picker.rpc.server import GrpcServer
from tests.support.picker.http2_peer import (
    PATH,
    REQUEST,
    BufferTransport,
    Held,
    Peer,
    connected,
    echo,
)

BLOCK = encode_fields([(name.encode(), value.encode()) for name, value in REQUEST])
HANDSHAKE_SECONDS, IDLE_SECONDS = 20.0, 900.0


def codes(peer: Peer) -> list[int]:
    data, at, found = b"".join(peer.transport.written), 0, []
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 3]), data[at + 3]
        if kind == GoAwayFrame.type:
            found.append(struct.unpack_from(">I", data, at + 13)[0])
        at += 9 + length
    return found


async def ended(peer: Peer) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert peer.gone == [peer.connection]


# Time


@pytest.mark.looptime
@pytest.mark.parametrize("begins_with", [b"", PREFACE[:10], PREFACE])
async def test_a_peer_that_does_not_shake_hands_is_cut_off(begins_with: bytes) -> None:
    peer = Peer({PATH: echo}, handshake_seconds=HANDSHAKE_SECONDS)
    peer.connection.connection_made(peer.transport)
    if begins_with:
        peer.connection.data_received(begins_with)
    await asyncio.sleep(HANDSHAKE_SECONDS * 0.9)
    assert not peer.transport.closed
    await asyncio.sleep(HANDSHAKE_SECONDS * 0.2)
    assert peer.gone == [peer.connection]


@pytest.mark.looptime
async def test_a_connection_without_calls_ends_in_order_although_it_pings() -> None:
    peer = connected({PATH: echo}, idle_seconds=IDLE_SECONDS)
    await asyncio.sleep(500)
    peer.call(b"one", end=True)
    await peer.settle()
    for _ in range(8):
        peer.http2.ping(bytes(8))
        peer.push()
        await asyncio.sleep(IDLE_SECONDS / 8 - 1)
        assert not codes(peer)
        await peer.settle()
    await asyncio.sleep(8 + DRAIN_SECONDS / 2)
    assert codes(peer) == [ErrorCodes.NO_ERROR]
    late = peer.call(b"late", end=True)
    await peer.settle()
    assert peer.fields(late)["grpc-status"] == "0"
    assert peer.gone == [peer.connection]


@pytest.mark.looptime
@pytest.mark.parametrize("answers", [True, False])
async def test_a_silent_peer_with_calls_is_asked_whether_it_is_there(answers: bool) -> None:
    held = Held()
    peer = connected({PATH: held})
    peer.call()
    for _ in range(5):
        if answers:
            await peer.settle()
        await asyncio.sleep(KEEPALIVE_SECONDS)
    assert peer.gone == ([] if answers else [peer.connection])
    assert held.ended == ([] if answers else ["cancelled"])
    peer.connection.connection_lost(None)
    await peer.settle()


async def test_a_tls_handshake_that_is_not_begun_is_cut_off() -> None:
    tls = TlsOptions(self_signed())
    options = ServerOptions("127.0.0.1", 0, tls, handshake_seconds=0.05)
    server = GrpcServer(options, {})
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(120):
        assert await reader.read() == b""
    writer.close()
    await server.stop(0)


async def test_a_server_forgets_connections_that_are_gone() -> None:
    server = GrpcServer(ServerOptions("127.0.0.1", 0), {})
    await server.start()
    first, second = server.accept(), server.accept()
    for connection in (first, second):
        connection.connection_made(BufferTransport(connection))
    assert server._connections == {first, second}
    first.connection_lost(None)
    assert server._connections == {second}
    second.connection_lost(None)
    assert not server._connections
    await server.stop(0)


# Waste


def opened_and_reset(count: int, at: int = 1) -> bytes:
    reset = NUMBER.pack(ErrorCodes.CANCEL)
    return b"".join(
        frame(FrameType.HEADERS, END_HEADERS, stream_id, BLOCK)
        + frame(FrameType.RST_STREAM, 0, stream_id, reset)
        for stream_id in range(at, at + 2 * count, 2)
    )


@pytest.mark.looptime
async def test_calls_that_are_given_up_at_once_without_end_close_the_connection() -> None:
    peer = connected({PATH: echo})
    await peer.settle()
    peer.connection.data_received(opened_and_reset(WASTE_BURST // 2))
    await peer.settle()
    peer.connection.data_received(opened_and_reset(WASTE_BURST // 2 - 10, WASTE_BURST + 1))
    await peer.settle()
    assert not peer.transport.closed
    peer.connection.data_received(opened_and_reset(20, 2 * WASTE_BURST + 1))
    assert codes(peer) == [ErrorCodes.ENHANCE_YOUR_CALM]
    assert peer.transport.closed
    await ended(peer)
    assert not peer.connection._tasks


@pytest.mark.looptime
async def test_calls_that_clients_of_a_busy_proxy_cancel_are_not_waste() -> None:
    """The rate is three times the highest that an Envoy was seen to cause, for half a minute."""
    peer = connected({PATH: echo})
    await peer.settle()
    at = 1
    for _ in range(30):
        peer.connection.data_received(opened_and_reset(WASTE_PER_SECOND // 20, at))
        at += WASTE_PER_SECOND // 10
        await peer.settle()
        await asyncio.sleep(0.05)
    assert not peer.transport.closed


@pytest.mark.looptime
@pytest.mark.parametrize("answered", [True, False])
async def test_calls_that_had_an_answer_or_were_old_are_no_waste(answered: bool) -> None:
    """A proxy may end each of its calls by a reset."""
    held = Held()
    peer = connected({PATH: echo if answered else held})
    await peer.settle()
    left = peer.connection._waste_left
    for _ in range(10):
        calls = [peer.call(b"x") for _ in range(50)]
        await peer.settle()
        await asyncio.sleep(0 if answered else 2)
        for stream_id in calls:
            peer.http2.reset_stream(stream_id)
        peer.push()
        await peer.settle()
    assert peer.connection._waste_left >= left


@pytest.mark.looptime
@pytest.mark.parametrize(
    "wasted",
    [
        frame(FrameType.PING, 0, 0, bytes(8)),
        frame(FrameType.SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)),
        frame(FrameType.PRIORITY, 0, 7, bytes(5)),
        frame(FrameType.DATA, 0, 1, b""),
        frame(0xEE, 0, 0, b"unknown"),
    ],
    ids=["ping", "settings", "priority", "empty data", "unknown"],
)
async def test_frames_that_only_make_work_close_the_connection(wasted: bytes) -> None:
    peer = connected({PATH: Held()})
    peer.call()
    await peer.settle()
    peer.connection.data_received(wasted * (WASTE_BURST - 10))
    await peer.settle()
    assert not peer.transport.closed
    peer.connection.data_received(wasted * 20)
    assert codes(peer) == [ErrorCodes.ENHANCE_YOUR_CALM]
    await ended(peer)


@pytest.mark.looptime
async def test_time_makes_up_for_waste() -> None:
    peer = connected({PATH: echo})
    await peer.settle()
    data = frame(FrameType.PING, 0, 0, bytes(8))
    for _ in range(5):
        peer.connection.data_received(data * (WASTE_BURST // 2))
        await peer.settle()
        await asyncio.sleep(WASTE_BURST / 2 / WASTE_PER_SECOND)
    assert not peer.transport.closed
    assert peer.saw(events.PingAckReceived)
