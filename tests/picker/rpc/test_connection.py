"""Calls over a transport that is a buffer: their life, flow control, and the limits of a peer."""

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any

import pytest
from h2 import events
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, PingFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc import call as grpc_call
from picker.rpc import connection as grpc_connection
from picker.rpc.calls import Read, RpcError, Status, Write
from picker.rpc.connection import DRAIN_SECONDS, KEEPALIVE_SECONDS, WASTE_BURST, WASTE_PER_SECOND
from picker.rpc.http2.engine import CONNECTION_WINDOW_BYTES
from picker.rpc.http2.frames import END_HEADERS, NUMBER, PREFACE, FrameType, frame
from picker.rpc.http2.headers import encode_fields
from picker.rpc.options import ServerOptions, TlsOptions
from picker.rpc.self_signed import self_signed
from picker.rpc.server import GrpcServer
from tests.depth import examples
from tests.support.picker.http2_peer import (
    PATH,
    REQUEST,
    BufferTransport,
    Held,
    Peer,
    connected,
    echo,
    holding,
    prefix,
    settled,
    turns,
)

DAMAGE = b"\0\0\1" + bytes(6) + b"x"  # DATA on stream 0


@pytest.fixture
async def peer() -> Peer:
    peer = connected({PATH: echo})
    return peer


async def test_calls_that_end_unread_give_their_part_of_the_connections_window_back() -> None:
    peer = await settled({PATH: Held()})
    message = bytes(16_000)
    for _ in range(30):
        stream_id = peer.call()
        for _ in range(60):
            peer.http2.send_data(stream_id, prefix(message) + message)
        peer.push()
        peer.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await peer.settle()
    assert peer.http2.outbound_flow_control_window > CONNECTION_WINDOW_BYTES // 2


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"method": "GET"}, {":status": "405", "allow": "POST"}),
        ({"content-type": "text/plain"}, {":status": "415"}),
        ({"path": "/a/B"}, {":status": "200", "grpc-status": "12"}),
    ],
)
async def test_a_request_other_than_a_call_is_refused_and_its_data_ignored(
    peer: Peer, changes: dict[str, str], fields: dict[str, str]
) -> None:
    stream_id = peer.call(b"one", **changes)
    await peer.settle()
    assert fields.items() <= peer.fields(stream_id).items()
    assert [reset.error_code for reset in peer.saw(events.StreamReset)] == [ErrorCodes.NO_ERROR]
    assert not peer.connection.http2.streams


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x01\0\0\0\x01x", Status.UNIMPLEMENTED),
        (b"\x07\0\0\0\x01x", Status.INTERNAL),
        (prefix(bytes(2000)), Status.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_message_that_cannot_be_served_ends_its_call(data: bytes, status: Status) -> None:
    peer = connected({PATH: echo}, max_message_bytes=1000)
    stream_id, other = peer.call(), peer.call(b"fine", end=True)
    peer.http2.send_data(stream_id, data)
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == str(int(status))
    assert peer.fields(stream_id)["grpc-message"]
    assert peer.fields(other)["grpc-status"] == "0"


async def test_a_stream_that_ends_within_a_message_is_an_error(peer: Peer) -> None:
    stream_id = peer.call()
    peer.http2.send_data(stream_id, prefix(b"four")[:3], end_stream=True)
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == "13"
    assert peer.data(stream_id) == b""


async def test_a_reset_cancels_the_call_and_frees_it() -> None:
    peer, held, stream_id = await holding(b"one")
    peer.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
    await peer.settle()
    assert held.ended == ["cancelled"]
    assert not peer.connection.http2.streams
    assert not peer.connection._tasks


async def test_a_reset_before_the_call_has_begun_is_no_trouble(peer: Peer, caplog: Any) -> None:
    peer.http2.send_headers(1, REQUEST)
    peer.http2.reset_stream(1)
    await peer.settle()
    assert not peer.connection.http2.streams
    assert not peer.connection._tasks
    assert not caplog.records


async def test_a_lost_connection_cancels_its_calls_and_is_reported_after_them() -> None:
    peer, held, _ = await holding()
    peer.connection.connection_lost(ConnectionResetError())
    assert not peer.gone
    await peer.settle()
    assert held.ended == ["cancelled"]
    assert peer.gone == [peer.connection]


async def test_draining_says_so_and_waits_for_the_calls_under_way() -> None:
    peer, held, stream_id = await holding(end=True)
    peer.connection.drain()
    goaway = GoAwayFrame(0, last_stream_id=2**31 - 1).serialize()
    await asyncio.sleep(0)
    assert goaway in b"".join(peer.transport.written)
    await peer.settle()
    assert not peer.transport.closed
    held.release.set()
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == "0"
    assert [end.last_stream_id for end in peer.saw(events.ConnectionTerminated)] == [stream_id]
    assert peer.transport.closed
    assert peer.gone == [peer.connection]


async def test_a_call_that_crosses_our_goodbye_is_served(peer: Peer) -> None:
    """The peer opened it before it could know of the goodbye."""
    await peer.settle()
    peer.connection.drain()
    await turns(3)
    assert not peer.transport.closed
    stream_id = peer.call(b"late", end=True)
    await peer.settle()
    assert peer.data(stream_id) == prefix(b"late") + b"late"
    assert peer.fields(stream_id)["grpc-status"] == "0"
    assert [end.last_stream_id for end in peer.saw(events.ConnectionTerminated)] == [stream_id]
    assert peer.gone == [peer.connection]


@pytest.mark.looptime
async def test_a_peer_that_never_reads_our_goodbye_is_not_waited_for_long(peer: Peer) -> None:
    peer.connection.drain()
    await asyncio.sleep(grpc_connection.DRAIN_SECONDS * 0.9)
    assert not peer.transport.closed
    await asyncio.sleep(grpc_connection.DRAIN_SECONDS * 0.2)
    assert peer.gone == [peer.connection]


async def test_cancelling_does_not_wait_for_an_answer(peer: Peer) -> None:
    await peer.settle()
    peer.connection.drain()
    peer.connection.cancel()
    await turns(3)
    assert peer.gone == [peer.connection]


async def test_a_connection_that_drains_as_it_is_made_sends_its_settings_first() -> None:
    """Anything else as the first frame is an error to the peer."""
    peer = Peer({PATH: echo})
    peer.connection._on_made = lambda connection: connection.drain()
    peer.connect()
    first = b"".join(peer.transport.written)
    assert first[3] == SettingsFrame.type
    await peer.settle()
    assert peer.gone == [peer.connection]


async def test_a_half_closed_connection_ends_its_calls() -> None:
    peer, held, _ = await holding()
    peer.connection.pause_writing()
    assert not peer.connection.eof_received()
    await turns(3)
    assert held.ended == ["cancelled"]
    assert peer.gone == [peer.connection]


async def test_bytes_after_the_close_are_ignored(peer: Peer) -> None:
    peer.connection.data_received(DAMAGE)
    assert peer.transport.closed
    timer = peer.connection._timer
    peer.transport.written.clear()
    peer.connection.data_received(DAMAGE)
    assert peer.connection._timer is timer
    await asyncio.sleep(0)
    peer.connection.data_received(DAMAGE)
    assert not peer.transport.written


async def test_a_peer_that_says_goodbye_gets_its_answers_first() -> None:
    """A client's GOAWAY means no new streams, not the end of those that are open."""
    held = Held()
    peer = await settled({PATH: held})
    peer.call(end=True)
    await held.started.wait()
    peer.connection.data_received(GoAwayFrame(0).serialize())
    await asyncio.sleep(0)
    assert not peer.transport.closed
    held.release.set()
    await turns(5)
    assert held.ended == ["returned"]
    assert peer.transport.closed


async def test_a_failing_method_is_logged_but_a_refusal_is_not(caplog: Any) -> None:
    async def broken(read: Read, write: Write) -> None:
        raise ValueError("secret")

    async def refusing(read: Read, write: Write) -> None:
        raise RpcError(Status.NOT_FOUND, "100% unknown: é")

    peer = connected({PATH: broken, "/b": refusing})
    ours, theirs = peer.call(end=True), peer.call(end=True, path="/b")
    await peer.settle()
    assert peer.fields(ours)["grpc-status"] == "13"
    assert "secret" not in peer.fields(ours)["grpc-message"]
    assert [record.message for record in caplog.records] == ["a call failed"]
    assert peer.fields(theirs)["grpc-status"] == "5"
    assert peer.fields(theirs)["grpc-message"] == "100%25 unknown: %C3%A9"


async def test_thousands_of_calls_leave_nothing_behind(peer: Peer) -> None:
    for _ in range(3000):
        peer.call(b"x", end=True)
        await peer.settle()
    assert not peer.connection.http2.streams
    assert not peer.connection._tasks


async def test_more_streams_than_agreed_are_not_served() -> None:
    peer = await settled({PATH: Held()})
    limit = peer.http2.remote_settings.max_concurrent_streams
    for _ in range(limit):
        peer.call()
    assert len(peer.connection.http2.streams) == limit
    assert not peer.transport.closed
    peer.http2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = limit + 1
    peer.http2.remote_settings.acknowledge()
    one_too_many = peer.call()
    assert len(peer.connection.http2.streams) == limit
    await peer.settle()
    assert [reset.stream_id for reset in peer.saw(events.StreamReset)] == [one_too_many]
    await asyncio.sleep(0)


GARBAGE: list[Callable[[], bytes]] = [
    lambda: b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS on a plain port
    lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\xff" * 50,
    lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff" + bytes(6),  # a frame of 16 MB
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_connection_without_http2_is_closed_without_a_traceback(
    garbage: Callable[[], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    peer = Peer({PATH: echo})
    peer.connection.connection_made(peer.transport)
    peer.connection.data_received(garbage())
    await asyncio.sleep(0)
    assert peer.transport.closed
    assert peer.gone == [peer.connection]
    assert all(record.exc_info is None for record in caplog.records)


async def test_a_header_list_over_the_limit_breaks_the_connection(peer: Peer) -> None:
    peer.http2.send_headers(1, [*REQUEST, *((f"x-{n}", "y" * 1000) for n in range(70))])
    peer.push()
    await asyncio.sleep(0)
    assert peer.transport.closed


@examples(150)
@given(st.data())
def test_damaged_bytes_never_raise_and_never_leave_tasks(data: st.DataObject) -> None:
    async def converse() -> None:
        peer = Peer({PATH: echo})
        peer.http2.initiate_connection()
        peer.http2.send_headers(1, REQUEST, priority_weight=20, priority_depends_on=0)
        peer.http2.send_data(1, prefix(b"one") + b"one", end_stream=True)
        peer.http2.ping(bytes(8))
        peer.http2.send_headers(3, REQUEST)
        peer.http2.reset_stream(3)
        sent = bytearray(peer.http2.data_to_send())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(24, len(sent) - 1))
            sent[at] = data.draw(st.integers(0, 255))
        peer.connection.connection_made(peer.transport)
        peer.connection.data_received(bytes(sent))
        await turns(5)
        if not peer.transport.closed:
            peer.connection.connection_lost(None)
        await turns(3)
        assert peer.gone == [peer.connection]
        assert not peer.connection._tasks

    asyncio.run(converse())


async def test_a_call_cut_at_every_byte_is_the_same_call() -> None:
    """No piece of HTTP/2 or gRPC may be assumed to arrive whole."""
    peer = Peer({PATH: echo})
    peer.http2.initiate_connection()
    peer.http2.send_headers(1, REQUEST)
    data = b"".join(prefix(message) + message for message in (b"one", b"", b"two"))
    for at in range(len(data)):
        peer.http2.send_data(1, data[at : at + 1], end_stream=at == len(data) - 1)
    peer.connection.connection_made(peer.transport)
    for byte in peer.http2.data_to_send():
        peer.connection.data_received(bytes([byte]))
    await peer.settle()
    assert peer.data(1) == data
    assert peer.fields(1)[":status"] == "200"
    assert peer.fields(1)["grpc-status"] == "0"
    assert not peer.saw(events.StreamReset)  # we had closed our side


async def test_replies_of_one_turn_leave_in_one_write(peer: Peer) -> None:
    await peer.settle()
    peer.http2.send_headers(1, REQUEST)
    peer.http2.send_headers(3, REQUEST)
    for stream_id in (1, 3, 1):
        peer.http2.send_data(stream_id, prefix(b"one") + b"one")
    peer.push()
    await turns(10)
    assert len(peer.transport.written) == 1
    await peer.settle()
    assert peer.data(1) == (prefix(b"one") + b"one") * 2
    assert peer.data(3) == prefix(b"one") + b"one"


async def test_a_megabyte_goes_out_through_tiny_windows() -> None:
    body = bytes(range(256)) * 4096

    async def send(read: Read, write: Write) -> None:
        for at in range(0, len(body), 65536):
            await write(body[at : at + 65536])

    peer = Peer({PATH: send})
    peer.connect(window_bytes=1000)
    stream_id = peer.call(end=True)
    await peer.settle()
    assert len(peer.data(stream_id)) == 1000
    stream = peer.connection.http2.streams[stream_id]
    assert len(stream.unsent) < 400_000  # the method waits; its megabyte is not here
    expected = b"".join(prefix(piece) + piece for piece in [body[:65536]] * 16)
    while "grpc-status" not in peer.fields(stream_id):
        peer.http2.increment_flow_control_window(50_000)
        peer.http2.increment_flow_control_window(50_000, stream_id)
        before = len(peer.data(stream_id))
        await peer.settle()
        assert len(peer.data(stream_id)) - before in (50_000, len(expected) - before)
    assert peer.data(stream_id) == expected
    assert peer.fields(stream_id)["grpc-status"] == "0"


async def test_a_call_that_waits_for_its_window_does_not_stop_another() -> None:
    peer = Peer({PATH: echo})
    peer.connect(window_bytes=10)
    stuck = peer.call(bytes(100), end=True)
    quick = peer.call(b"1", end=True)
    await peer.settle()
    assert len(peer.data(stuck)) == 10
    assert peer.fields(quick)["grpc-status"] == "0"
    peer.http2.reset_stream(stuck)
    await peer.settle()
    assert not peer.connection.http2.streams


async def test_a_raised_initial_window_opens_streams_that_wait() -> None:
    peer = Peer({PATH: echo})
    peer.connect(window_bytes=10)
    stream_id = peer.call(bytes(100), end=True)
    await peer.settle()
    peer.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    await peer.settle()
    assert peer.data(stream_id) == prefix(bytes(100)) + bytes(100)


async def test_unread_messages_close_the_window_and_reading_opens_it() -> None:
    go = asyncio.Event()
    got: list[int] = []

    async def late(read: Read, write: Write) -> None:
        await go.wait()
        while (message := await read()) is not None:
            got.append(len(message))

    peer = await settled({PATH: late})
    stream_id = peer.call()
    sent = 0
    while (room := peer.http2.local_flow_control_window(stream_id)) >= 16_005:
        for _ in range(min(room // 16_005, 20)):
            peer.http2.send_data(stream_id, prefix(bytes(16_000)) + bytes(16_000))
            sent += 1
        await peer.settle()
    assert 60 <= sent <= 100  # 1 MiB, and what may wait unread
    go.set()
    await peer.settle()
    assert peer.http2.local_flow_control_window(stream_id) > 500_000
    peer.http2.end_stream(stream_id)
    await peer.settle()
    assert got == [16_000] * sent


async def test_empty_messages_close_the_window_too() -> None:
    async def deaf(read: Read, write: Write) -> None:
        await asyncio.Event().wait()

    peer = await settled({PATH: deaf})
    stream_id = peer.call()
    window = peer.http2.local_flow_control_window(stream_id)
    sent = 0
    while peer.http2.local_flow_control_window(stream_id) >= 16_000 and sent < 4 * window:
        peer.http2.send_data(stream_id, prefix(b"") * 3200)
        sent += 16_000
        await peer.settle()
    assert sent < window + grpc_call.MAX_UNREAD_BYTES


async def test_messages_that_were_read_cost_nothing_any_more(monkeypatch: Any) -> None:
    monkeypatch.setattr(grpc_call, "MAX_UNREAD_BYTES", 16_100)
    num_read = 0

    async def count(read: Read, write: Write) -> None:
        nonlocal num_read
        while await read() is not None:
            num_read += 1

    peer = await settled({PATH: count})
    stream_id = peer.call()
    for _ in range(400):
        peer.http2.send_data(stream_id, prefix(bytes(16_000)) + bytes(16_000))
        await peer.settle()
    assert num_read == 400


async def test_a_paused_transport_holds_calls_back_but_not_control_frames(peer: Peer) -> None:
    await peer.settle()
    peer.connection.pause_writing()
    stream_id = peer.call(b"one", end=True)
    peer.http2.ping(b"12345678")
    await peer.settle()
    assert peer.data(stream_id) == b""
    assert peer.saw(events.PingAckReceived)
    peer.connection.resume_writing()
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == "0"


async def test_a_peer_that_asks_and_never_reads_is_cut_off(peer: Peer) -> None:
    peer.connection.pause_writing()
    peer.transport.unread_bytes = grpc_connection.ABORT_BYTES + 1
    peer.connection.data_received(PingFrame(0, opaque_data=bytes(8)).serialize())
    await peer.settle()
    assert peer.transport.closed
    assert peer.gone == [peer.connection]


async def test_cancelling_ends_each_call_even_without_a_window() -> None:
    async def flood(read: Read, write: Write) -> None:
        while True:
            await write(bytes(100_000))

    peer = Peer({PATH: flood})
    peer.connect(window_bytes=10)
    stream_id = peer.call(end=True)
    await peer.settle()
    peer.connection._draining = True  # without the first GOAWAY, at which the library would stop
    peer.connection.cancel()
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == "14"
    assert peer.transport.closed


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
    await turns(5)
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
    peer = await settled({PATH: echo})
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
    peer = await settled({PATH: echo})
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
    peer = await settled({PATH: echo if answered else held})
    left = peer.connection._waste_left
    for _ in range(10):
        calls = [peer.call(b"x") for _ in range(50)]
        await peer.settle()
        await asyncio.sleep(0 if answered else 2)
        for stream_id in calls:
            peer.http2.reset_stream(stream_id)
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
    peer = await settled({PATH: echo})
    data = frame(FrameType.PING, 0, 0, bytes(8))
    for _ in range(5):
        peer.connection.data_received(data * (WASTE_BURST // 2))
        await peer.settle()
        await asyncio.sleep(WASTE_BURST / 2 / WASTE_PER_SECOND)
    assert not peer.transport.closed
    assert peer.saw(events.PingAckReceived)
