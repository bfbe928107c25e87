"""Flow control, both ways, and how its bytes are cut and joined."""

import asyncio

import pytest
from h2 import events
from h2.settings import SettingCodes
from hyperframe.frame import PingFrame

from picker.rpc import call as grpc_call
from picker.rpc import connection as grpc_connection
from picker.rpc.calls import Read, Write
from tests.support.picker.http2_peer import PATH, REQUEST, Peer, connected, echo, prefix


@pytest.fixture
async def peer() -> Peer:
    peer = connected({PATH: echo})
    return peer


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
    for _ in range(10):
        await asyncio.sleep(0)
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
        peer.push()
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
    peer.push()
    await peer.settle()
    assert not peer.connection.http2.streams


async def test_a_raised_initial_window_opens_streams_that_wait() -> None:
    peer = Peer({PATH: echo})
    peer.connect(window_bytes=10)
    stream_id = peer.call(bytes(100), end=True)
    await peer.settle()
    peer.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    peer.push()
    await peer.settle()
    assert peer.data(stream_id) == prefix(bytes(100)) + bytes(100)


async def test_unread_messages_close_the_window_and_reading_opens_it() -> None:
    go = asyncio.Event()
    got: list[int] = []

    async def late(read: Read, write: Write) -> None:
        await go.wait()
        while (message := await read()) is not None:
            got.append(len(message))

    peer = connected({PATH: late})
    await peer.settle()
    stream_id = peer.call()
    sent = 0
    while (room := peer.http2.local_flow_control_window(stream_id)) >= 16_005:
        for _ in range(min(room // 16_005, 20)):
            peer.http2.send_data(stream_id, prefix(bytes(16_000)) + bytes(16_000))
            sent += 1
        peer.push()
        await peer.settle()
    assert 60 <= sent <= 100  # 1 MiB, and what may wait unread
    go.set()
    await peer.settle()
    assert peer.http2.local_flow_control_window(stream_id) > 500_000
    peer.http2.end_stream(stream_id)
    peer.push()
    await peer.settle()
    assert got == [16_000] * sent


async def test_empty_messages_close_the_window_too() -> None:
    async def deaf(read: Read, write: Write) -> None:
        await asyncio.Event().wait()

    peer = connected({PATH: deaf})
    await peer.settle()
    stream_id = peer.call()
    window = peer.http2.local_flow_control_window(stream_id)
    sent = 0
    while peer.http2.local_flow_control_window(stream_id) >= 16_000 and sent < 4 * window:
        peer.http2.send_data(stream_id, prefix(b"") * 3200)
        sent += 16_000
        peer.push()
        await peer.settle()
    assert sent < window + grpc_call.MAX_UNREAD_BYTES


async def test_messages_that_were_read_cost_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_call, "MAX_UNREAD_BYTES", 16_100)
    num_read = 0

    async def count(read: Read, write: Write) -> None:
        nonlocal num_read
        while await read() is not None:
            num_read += 1

    peer = connected({PATH: count})
    await peer.settle()
    stream_id = peer.call()
    for _ in range(400):
        peer.http2.send_data(stream_id, prefix(bytes(16_000)) + bytes(16_000))
        peer.push()
        await peer.settle()
    assert num_read == 400


async def test_a_paused_transport_holds_calls_back_but_not_control_frames(peer: Peer) -> None:
    await peer.settle()
    peer.connection.pause_writing()
    stream_id = peer.call(b"one", end=True)
    peer.http2.ping(b"12345678")
    peer.push()
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
