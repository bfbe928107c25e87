"""One HTTP/2 connection of gRPC calls: asyncio's bytes to HTTP/2 events to calls, and back.

Theory of operation
-------------------
`data_received` gives the bytes to an HTTP/2 engine, which tells what the peer did. A call is a task
that runs its method; tasks write into the buffers of their `CallStream` and ask for a flush. A
flush happens once per turn of the event loop: it moves what the peer's windows allow from the calls
to the engine, and then gives the transport everything at once, so that replies of one turn leave in
one system call.

What a call sends waits for the event loop's next turn, for the peer's window, and for the socket
(while the transport is paused). All the time the call's own buffer holds it, and the method's
`write` waits when that is full. A peer that makes us answer its control frames without reading the
answers is cut off.

A connection ends in order when it drains (the server stops, the peer says goodbye, no call came for
long) and its last call is over; or at once when either side breaks it, when the peer does not shake
hands in time, or does not answer a PING while it has calls. Calls that cross our
GOAWAY on the way are served: a PING behind it tells when the peer has read it, and only then the
end of the last call ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from picker.errors import RefusedError
from picker.rpc.calls import ByMetadata, RpcError, Served, Status
from picker.rpc.framing import timeout_seconds
from picker.rpc.http2 import Http2Engine, Http2Error, Http2Listener
from picker.rpc.http2_frames import FrameEngine
from picker.rpc.http2_wire import ErrorCode, graceful_goaway
from picker.rpc.options import ServerOptions
from picker.rpc.sending import SendQueue, trailers
from picker.rpc.stream import CallStream

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 60.0  # of silence before a peer that has calls is asked, and to answer in
LINGER_SECONDS = 5.0
DRAIN_SECONDS = 1.0  # how long a peer may take to say that it has read our GOAWAY
HIGH_WATER_BYTES = 1024 * 1024  # unsent by the transport: calls wait
# Unsent by the transport although calls wait: the peer does not read. More than the high water and
# one call's turn, so that only control frames get there.
ABORT_BYTES = 4 * 1024 * 1024
_DRAIN_PING = b"draining"
_KEEPALIVE_PING = b"all well"
# Calls that the peer gives up before anything was sent to it, within a moment of opening them, and
# frames that only make work. One Envoy worker whose every client leaves at once was seen to give up
# 3,300 calls a second; nearly all arrive in one read with what opened them, so that only their
# number tells them from an attack, of which this process takes 100,000 a second (13,000 on `h2`).
# The burst is what such an Envoy sends to a picker that was stopped for six seconds.
YOUNG_SECONDS = 1.0
WASTE_PER_SECOND = 10_000
WASTE_BURST = 20_000


class WasteLimit:
    """Owns how much a peer may waste now: a bucket that fills again with time."""

    __slots__ = ("_filled_at", "_left")

    def __init__(self, now: float) -> None:
        self._left, self._filled_at = float(WASTE_BURST), now

    def takes_one_more(self, now: float) -> bool:
        """Count one; False: it was one too many. `now` never goes back, in seconds."""
        refilled = self._left + (now - self._filled_at) * WASTE_PER_SECOND
        self._left = min(refilled, WASTE_BURST) - 1
        self._filled_at = now
        return self._left >= 0


class GrpcConnection(asyncio.Protocol):
    """Owns one connection and its calls.

    `methods` maps paths to what serves them, `options` say what a peer may take of space and time.
    `on_made` is called once, when the connection stands,
    and then `on_gone` once, when it is closed and no task of it runs any more.
    """

    def __init__(
        self,
        methods: Mapping[str, Served],
        options: ServerOptions,
        on_made: Callable[[GrpcConnection], None],
        on_gone: Callable[[GrpcConnection], None],
        engine: Callable[[Http2Listener], Http2Engine] = FrameEngine,
    ) -> None:
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._options = options
        self._on_made = on_made
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._http2 = engine(self)
        self._streams: dict[int, CallStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = SendQueue(self._http2, self._write_out, self._sent_to_the_end)
        self._flush_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None  # for a peer that does nothing
        self._last_heard = self._idle_since = self._loop.time()
        self._waste = WasteLimit(self._last_heard)
        self._asked_at: float | None = None  # by a PING, whether the peer is there
        self._paused = False
        self._draining = False
        self._no_more_calls = False  # the peer knows that it should open none
        self._cancelled = False

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._http2.start()
        first = min(self._options.handshake_seconds, self._options.idle_seconds)
        self._set_timer(first, self._check)
        self._on_made(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Whatever the peer sent; of no interest once the connection closes."""
        if self._transport is None or self._transport.is_closing():
            return
        self._last_heard = self._loop.time()
        try:
            self._http2.receive(data)
        except Http2Error as error:
            log.info("a peer broke HTTP/2: %s", error)
            self._break_off()
            return
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._break_off()
            return
        self._schedule_flush()

    def eof_received(self) -> bool:
        """The peer sends no more; a half-closed connection is of no use to HTTP/2.

        The transport would first send all it holds, to a peer that perhaps reads no more either.
        """
        self._break_off()
        return False

    def pause_writing(self) -> None:
        """The peer reads slower than calls write."""
        self._paused = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._paused = False
        self._schedule_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call."""
        self._transport = None
        for handle in (self._timer, self._flush_handle):
            if handle is not None:
                handle.cancel()
        self._abandon_all()
        self._tell_when_gone()

    # The server's side

    def drain(self) -> None:
        """Ask for no more calls, and close once those under way are over."""
        transport = self._transport
        if self._draining or transport is None or transport.is_closing():
            return
        self._draining = True
        self._write_out()  # nothing may stand before our settings
        transport.write(graceful_goaway())
        self._http2.ping(_DRAIN_PING)
        self._set_timer(DRAIN_SECONDS, self._drained)
        self._schedule_flush()

    def cancel(self) -> None:
        """End the calls under way; they are told UNAVAILABLE."""
        self._cancelled = True
        for stream in tuple(self._streams.values()):
            stream.discard_unsent()
            if stream.task is not None:
                stream.task.cancel()
            if stream.ending is not None:
                self.schedule(stream)
        self.drain()
        self._drained()  # a call that comes later would be refused: nothing to wait for

    def abort(self) -> None:
        """Close without a word to a peer that does not read."""
        if self._transport is not None:
            self._transport.abort()

    # The calls' side

    def acknowledge(self, stream_id: int, count: int) -> None:
        """`count` flow-controlled bytes have been dealt with."""
        if self._transport is not None:
            self._http2.acknowledge(stream_id, count)
            self._schedule_flush()

    def schedule(self, stream: CallStream) -> None:
        """`stream` has something to send."""
        if self._sending.add(stream):
            self._schedule_flush()

    # What the peer did: implements `Http2Listener`

    def on_request(self, stream_id: int, headers: Mapping[bytes, bytes]) -> None:
        """A call, or something that is none."""
        options = self._options
        stream = CallStream(
            stream_id, self, options.max_message_bytes, options.bodies, self._last_heard
        )
        self._streams[stream_id] = stream
        if headers.get(b":method") != b"POST":
            stream.end(((b":status", b"405"), (b"allow", b"POST")))
        elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.end(((b":status", b"415"),))
        elif self._cancelled:
            stream.end(trailers(Status.UNAVAILABLE, "shutting down"))
        else:
            self._call(stream, headers)

    def on_data(self, stream_id: int, data: bytes, flow_controlled_bytes: int) -> None:
        """Content of a call; of one that is over it counts as dealt with."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self._http2.acknowledge(stream_id, flow_controlled_bytes)
        else:
            stream.feed(data, flow_controlled_bytes)

    def on_end(self, stream_id: int) -> None:
        """The caller has closed its side."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.end_input()

    def on_reset(self, stream_id: int) -> None:
        """The caller has given up."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            unanswered = not stream.head_sent and not stream.unsent_bytes
            self._forget(stream)
            self._abandon(stream)
            if unanswered and self._last_heard - stream.opened_at < YOUNG_SECONDS:
                self.on_chore()

    def on_chore(self) -> None:
        """The peer has made work for nothing. Raises `Http2Error` when that is too much."""
        if not self._waste.takes_one_more(self._last_heard):
            self._http2.close(ErrorCode.ENHANCE_YOUR_CALM)
            raise Http2Error("it wastes work: resets, pings or other frames without end")

    def on_window(self, stream_id: int) -> None:
        """More can be sent."""
        self._sending.unblock(stream_id)

    def on_ping_answered(self, data: bytes) -> None:
        """Our GOAWAY was read."""
        if data == _DRAIN_PING:
            self._drained()

    def on_goodbye(self, error_code: int) -> None:
        """The peer opens no more calls."""
        if not error_code:
            self.drain()
            self._drained()
        else:
            log.info("a peer gave up an HTTP/2 connection: error %d", error_code)
            self._close()

    # The course of a call

    def _call(self, stream: CallStream, headers: Mapping[bytes, bytes]) -> None:
        path = headers.get(b":path", b"")
        method = self._methods.get(path)
        if method is None:
            text = f"unknown method {path.decode('ascii', 'replace')}"
            stream.end(trailers(Status.UNIMPLEMENTED, text))
            return
        if isinstance(method, ByMetadata):
            method = method.choose(headers)
        task = self._loop.create_task(method(stream.read, stream.write), name="grpc call")
        stream.task = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._finished, stream))
        seconds = timeout_seconds(headers.get(b"grpc-timeout", b""))
        if seconds is not None:
            stream.timer = self._loop.call_later(seconds, self._expire, stream)

    def _finished(self, stream: CallStream, task: asyncio.Task[None]) -> None:
        """A method has returned, failed or been cancelled; runs exactly once per call."""
        self._tasks.discard(task)
        stream.task = None  # one that was cancelled holds its frames, and so the stream
        if stream.timer is not None:
            stream.timer.cancel()
        outcome = self._outcome(stream, task)
        if not stream.gone:
            stream.end(trailers(*outcome))
        self._tell_when_gone()

    def _outcome(self, stream: CallStream, task: asyncio.Task[None]) -> tuple[Status, str]:
        if task.cancelled():
            if self._cancelled:
                return Status.UNAVAILABLE, "shutting down"
            return Status.CANCELLED, "cancelled"
        error = task.exception()
        if stream.failure is not None:
            return stream.failure.status, str(stream.failure)
        if error is None:
            return Status.OK, ""
        if isinstance(error, RpcError | RefusedError):  # the latter for want of room
            status = error.status if isinstance(error, RpcError) else Status.RESOURCE_EXHAUSTED
            return status, str(error)
        log.error("a call failed", exc_info=error)
        return Status.INTERNAL, "internal error"

    def _expire(self, stream: CallStream) -> None:
        stream.discard_unsent()
        stream.end(trailers(Status.DEADLINE_EXCEEDED, "deadline exceeded"))
        if stream.task is not None:
            stream.task.cancel()

    def _abandon(self, stream: CallStream) -> None:
        left = stream.drop()
        if left:
            self.acknowledge(stream.stream_id, left)
        if stream.task is not None:
            stream.task.cancel()

    def _abandon_all(self) -> None:
        for stream in tuple(self._streams.values()):
            self._forget(stream)
            self._abandon(stream)

    def _forget(self, stream: CallStream) -> None:
        self._streams.pop(stream.stream_id, None)
        self._sending.remove(stream.stream_id)
        if not self._streams:
            self._idle_since = self._loop.time()

    # Sending

    def _schedule_flush(self) -> None:
        if self._flush_handle is None and self._transport is not None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        if self._transport is None or self._transport.is_closing():
            return
        try:
            if not self._paused:
                self._sending.send()
        except Exception:
            log.exception("cannot send on an HTTP/2 connection")
            self._break_off()
            return
        self._write_out()
        if self._no_more_calls and not self._streams:
            self._close()

    def _sent_to_the_end(self, stream: CallStream) -> None:
        self._forget(stream)
        left = stream.drop()
        if left:
            self._http2.acknowledge(stream.stream_id, left)

    def _write_out(self) -> bool:
        """Give the transport what the engine has; whether it takes more."""
        if self._transport is None:
            return False
        data = self._http2.data_to_send()
        if data:
            self._transport.write(data)
            if self._paused and self._transport.get_write_buffer_size() > ABORT_BYTES:
                log.info("a peer does not read what it asks for; its connection is closed")
                self._transport.abort()
        return not self._paused

    # The end

    def _check(self) -> None:
        """Look now and then whether the peer is there and still needs the connection."""
        now, idle_seconds = self._loop.time(), self._options.idle_seconds
        wait = min(KEEPALIVE_SECONDS, idle_seconds)
        if not self._http2.has_met_peer:
            left = self._idle_since + self._options.handshake_seconds - now
            if left <= 0:
                self._give_up("has not begun HTTP/2 in time")
                return
            wait = min(wait, left)
        elif self._streams:
            if self._asked_at is not None and self._last_heard < self._asked_at:
                self._give_up("does not answer although it has calls")
                return
            self._ask_after(now)
        else:
            left = self._idle_since + idle_seconds - now
            if left <= 0:
                self.drain()
                return
            wait = min(wait, left)
        self._set_timer(wait, self._check)

    def _ask_after(self, now: float) -> None:
        self._asked_at = None
        if now - self._last_heard >= KEEPALIVE_SECONDS:
            self._asked_at = now
            self._http2.ping(_KEEPALIVE_PING)
            self._schedule_flush()

    def _give_up(self, why: str) -> None:
        log.info("a peer %s; its connection is closed", why)
        self.abort()

    def _drained(self) -> None:
        self._no_more_calls = True
        self._schedule_flush()

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, callback)

    def _break_off(self) -> None:
        """Say what was wrong, as far as the engine has prepared it, and close."""
        self._abandon_all()
        if self._transport is not None and not self._transport.is_closing():
            self._write_out()
            self._transport.close()
            # What the peer does not read would keep the connection open.
            self._set_timer(LINGER_SECONDS, self.abort)

    def _close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._http2.close()
            self._break_off()

    def _tell_when_gone(self) -> None:
        if self._transport is None and not self._tasks:
            self._on_gone(self)
