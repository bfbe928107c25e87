"""The life of calls and connections over a transport that is a buffer."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from h2 import events
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc import connection as grpc_connection
from picker.rpc.calls import Read, RpcError, Status, Write
from picker.rpc.http2.engine import CONNECTION_WINDOW_BYTES
from tests.depth import examples
from tests.support.picker.http2_peer import (
    PATH,
    REQUEST,
    Held,
    Peer,
    connected,
    echo,
    holding,
    prefix,
)

DAMAGE = b"\0\0\1" + bytes(6) + b"x"  # DATA on stream 0


@pytest.fixture
async def peer() -> Peer:
    peer = connected({PATH: echo})
    return peer


async def test_calls_that_end_unread_give_their_part_of_the_connections_window_back() -> None:
    peer = connected({PATH: Held()})
    await peer.settle()
    message = bytes(16_000)
    for _ in range(30):
        stream_id = peer.call()
        for _ in range(60):
            peer.http2.send_data(stream_id, prefix(message) + message)
        peer.push()
        peer.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
        peer.push()
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
    peer.push()
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == str(int(status))
    assert peer.fields(stream_id)["grpc-message"]
    assert peer.fields(other)["grpc-status"] == "0"


async def test_a_stream_that_ends_within_a_message_is_an_error(peer: Peer) -> None:
    stream_id = peer.call()
    peer.http2.send_data(stream_id, prefix(b"four")[:3], end_stream=True)
    peer.push()
    await peer.settle()
    assert peer.fields(stream_id)["grpc-status"] == "13"
    assert peer.data(stream_id) == b""


async def test_a_reset_cancels_the_call_and_frees_it() -> None:
    peer, held, stream_id = await holding(b"one")
    peer.http2.reset_stream(stream_id, ErrorCodes.CANCEL)
    peer.push()
    await peer.settle()
    assert held.ended == ["cancelled"]
    assert not peer.connection.http2.streams
    assert not peer.connection._tasks


async def test_a_reset_before_the_call_has_begun_is_no_trouble(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.http2.send_headers(1, REQUEST)
    peer.http2.reset_stream(1)
    peer.push()
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
    for _ in range(3):
        await asyncio.sleep(0)
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
    for _ in range(3):
        await asyncio.sleep(0)
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
    for _ in range(3):
        await asyncio.sleep(0)
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
    peer = connected({PATH: held})
    await peer.settle()
    peer.call(end=True)
    await held.started.wait()
    peer.connection.data_received(GoAwayFrame(0).serialize())
    await asyncio.sleep(0)
    assert not peer.transport.closed
    held.release.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert held.ended == ["returned"]
    assert peer.transport.closed


async def test_a_failing_method_is_logged_but_a_refusal_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    peer = connected({PATH: Held()})
    await peer.settle()
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
        for _ in range(5):
            await asyncio.sleep(0)
        if not peer.transport.closed:
            peer.connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert peer.gone == [peer.connection]
        assert not peer.connection._tasks

    asyncio.run(converse())
