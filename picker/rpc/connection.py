"""One HTTP/2 connection of gRPC calls: asyncio's bytes to HTTP/2 to calls, and back.

Theory of operation
-------------------
`data_received` gives the bytes to the HTTP/2 engine, which calls this and the streams; most calls
are served right there. What is to be sent gathers in the engine, and the transport gets everything
at once at the end of that, or in the next turn of the event loop when a task sends: replies of one
turn leave in one system call.

What a call sends waits for the peer's window and for the socket (while the transport is paused) in
the call's own buffer, and then takes turns with that of others. A peer that makes us answer its
control frames without reading the answers is cut off.

A connection ends in order when it drains (the server stops, the peer says goodbye, no call came for
long) and its last call is over; or at once when either end breaks it, when the peer does not shake
hands in time, or does not answer a PING while it has calls. Calls that cross our GOAWAY on the way
are served: a PING behind it tells when the peer has read it, and only then the end of the last call
ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from picker.rpc.call import HEAD, Call, Served
from picker.rpc.calls import Abort, Metadata, Status
from picker.rpc.framing import timeout_seconds
from picker.rpc.http2.engine import Http2Engine, Http2Error
from picker.rpc.http2.frames import ErrorCode, graceful_goaway
from picker.rpc.http2.headers import encode_fields
from picker.rpc.options import ServerOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEPALIVE_SECONDS = 60.0  # of silence before a peer that has calls is asked, and to answer in
LINGER_SECONDS = 5.0
DRAIN_SECONDS = 1.0  # how long a peer may take to say that it has read our GOAWAY
HIGH_WATER_BYTES = 1024 * 1024  # unsent by the transport: calls wait
# Unsent by the transport although calls wait: the peer does not read. More than the high water and
# one call's turn, so that only control frames get there.
ABORT_BYTES = 4 * 1024 * 1024
TURN_BYTES = 128 * 1024  # of one call, before it is another's turn
WRITE_BYTES = 256 * 1024  # given to the transport at once
_NOT_POST: Final = encode_fields(((b":status", b"405"), (b"allow", b"POST")))
_NOT_GRPC: Final = encode_fields(((b":status", b"415"),))
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
    """Owns one connection and its calls. Implements `Http2Listener` and `Outlet`.

    `served` maps paths to what opens their receivers, `options` say what a peer may take of space
    and time. `on_made` is called once, when the connection stands, and then `on_gone` once, when it
    is closed and no task of it runs any more.
    """

    def __init__(
        self,
        served: Mapping[bytes, Served],
        options: ServerOptions,
        on_made: Callable[[GrpcConnection], None],
        on_gone: Callable[[GrpcConnection], None],
    ) -> None:
        self.http2 = Http2Engine(self)
        self.is_paused = False  # the transport takes no more for now
        self.is_flush_due = False  # what the engine has is written soon
        self._served = served
        self._options = options
        self._on_made = on_made
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready: dict[int, Call] = {}  # those that have something to send, in order
        self._blocked: dict[int, Call] = {}  # those that wait for the connection's window
        self._timer: asyncio.TimerHandle | None = None  # for a peer that does nothing
        self._last_heard = self._idle_since = self._loop.time()
        self._waste = WasteLimit(self._last_heard)
        self._asked_at: float | None = None  # by a PING, whether the peer is there
        self._draining = False
        self._no_more_calls = False  # the peer knows that it should open none
        self._cancelled = False

    @property
    def peer(self) -> str:
        """Where the peer is, for the log."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return "{}:{}".format(*name[:2]) if isinstance(name, tuple) else "a unix socket"

    @property
    def calls(self) -> tuple[Call, ...]:
        """Those that are open."""
        return tuple(cast("Iterable[Call]", self.http2.streams.values()))

    # asyncio's half

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.http2.start()
        first = min(self._options.handshake_seconds, self._options.idle_seconds)
        self._set_timer(first, self._check)
        self._on_made(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Whatever the peer sent; of no interest once the connection closes."""
        if self._transport is None or self._transport.is_closing():
            return
        self._last_heard = self._loop.time()
        self.is_flush_due = True  # below, in one write
        try:
            self.http2.receive(data)
        except Http2Error as error:
            log.info("a peer broke HTTP/2: %s", error)
            self._break_off()
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._break_off()
        else:
            self._flush()

    def eof_received(self) -> bool:
        """The peer sends no more; a half-closed connection is of no use to HTTP/2.

        The transport would first send all it holds, to a peer that perhaps reads no more either.
        """
        self._break_off()
        return False

    def pause_writing(self) -> None:
        """The peer reads slower than calls write."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self.is_paused = False
        self.schedule_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End every call."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._drop_all()
        self._report_when_gone()

    # The server's half

    def drain(self) -> None:
        """Ask for no more calls, and close once those under way are over."""
        transport = self._transport
        if self._draining or transport is None or transport.is_closing():
            return
        self._draining = True
        # Not by `close`: that would name the last stream, and calls that cross this are served.
        self.http2.out.append(graceful_goaway())
        self.http2.ping(_DRAIN_PING)
        self._set_timer(DRAIN_SECONDS, self._drained)
        self.schedule_flush()

    def cancel(self) -> None:
        """End the calls under way with UNAVAILABLE."""
        self._cancelled = True
        for call in self.calls:
            call.break_off(Abort.SHUTDOWN, Status.UNAVAILABLE, "shutting down")
        self.drain()
        self._drained()  # a call that comes later would be refused: nothing to wait for

    def abort(self) -> None:
        """Close without a word to a peer that does not read."""
        if self._transport is not None:
            self._transport.abort()

    # The calls' half; see `Outlet`

    def schedule(self, call: Call) -> None:
        """`call` has something to send that could not be sent at once, or its end."""
        self._ready[call.stream_id] = call
        if not self.is_flush_due:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        """Something was given to the engine."""
        if not self.is_flush_due and self._transport is not None:
            self.is_flush_due = True
            self._loop.call_soon(self._flush)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it; the connection is not gone before it is over."""
        task = self._loop.create_task(coroutine, name="grpc call")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def on_reset(self, call: Call, is_unanswered: bool) -> None:
        """The peer has ended `call`."""
        self._forget(call)
        if is_unanswered and self._last_heard - call.opened_at < YOUNG_SECONDS:
            self.on_chore()

    # What the peer did; see `Http2Listener`

    def on_request(self, stream_id: int, send_window: int, headers: Metadata) -> Call:
        """A call, or something that is none."""
        options, budget = self._options, self._options.budget
        now = self._last_heard
        call = Call(stream_id, send_window, self, options.max_message_bytes, budget, now)
        if headers.get(b":method") != b"POST":
            call.refuse(_NOT_POST)
        elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            call.refuse(_NOT_GRPC)
        elif self._cancelled:
            call.end(Status.UNAVAILABLE, "shutting down")
        else:
            self._open(call, headers)
        return call

    def _open(self, call: Call, headers: Metadata) -> None:
        path = headers.get(b":path", b"")
        served = self._served.get(path)
        if served is None:
            call.end(Status.UNIMPLEMENTED, f"unknown method {path.decode('ascii', 'replace')}")
            return
        if b"grpc-timeout" in headers:
            seconds = timeout_seconds(headers[b"grpc-timeout"])
            if seconds is not None:
                late = (Abort.CANCELLED, Status.DEADLINE_EXCEEDED, "deadline exceeded")
                call.timer = self._loop.call_later(seconds, call.break_off, *late)
        call.open(served, headers)

    def on_chore(self) -> None:
        """The peer has made work for nothing. Raises `Http2Error` when that is too much."""
        if not self._waste.takes_one_more(self._last_heard):
            self.http2.close(ErrorCode.ENHANCE_YOUR_CALM)
            raise Http2Error("it wastes work: resets, pings or other frames without end")

    def on_window(self) -> None:
        """More can be sent on all streams, perhaps."""
        self._ready |= self._blocked
        self._blocked.clear()

    def on_ping_answered(self, data: bytes) -> None:
        """Our GOAWAY was read."""
        if data == _DRAIN_PING:
            self._drained()

    def on_goaway(self, error_code: int) -> None:
        """The peer opens no more calls."""
        if not error_code:
            self.drain()
            self._drained()
        else:
            log.info("a peer gave up an HTTP/2 connection: error %d", error_code)
            self._close()

    # Sending

    def _flush(self) -> None:
        self.is_flush_due = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._ready and not self.is_paused:
            self.is_flush_due = True  # what is sent meanwhile is written below
            try:
                self._send_in_turns()
            except Exception:
                log.exception("cannot send on an HTTP/2 connection")
                self._break_off()
                return
            self.is_flush_due = False
        self._write_out()
        if self._no_more_calls and not self.http2.streams:
            self._close()

    def _send_in_turns(self) -> None:
        """Serve calls in turn until all is sent or the transport is full."""
        moved = 0
        while self._ready:
            for call in tuple(self._ready.values()):
                moved += self._send_turn(call)
                if moved >= WRITE_BYTES:
                    moved = 0
                    if not self._write_out():
                        return

    def _send_turn(self, call: Call) -> int:
        """Move one call's share to the engine; its bytes."""
        moved, http2 = 0, self.http2
        if call.unsent:
            if not call.head_sent:
                call.head_sent = True
                http2.send_headers(call, HEAD)
            allowed = min(http2.window(call), TURN_BYTES)
            while moved < allowed and call.unsent:
                data = call.take(min(allowed - moved, http2.max_frame_bytes))
                http2.send_data(call, data)
                moved += len(data)
        if not call.unsent:
            self._ready.pop(call.stream_id, None)
            self._blocked.pop(call.stream_id, None)
            if call.ending is not None:
                self._send_ending(call, call.ending)
        elif http2.window(call) <= 0:
            del self._ready[call.stream_id]
            self._blocked[call.stream_id] = call
        return moved

    def _send_ending(self, call: Call, ending: bytes) -> None:
        self.http2.send_headers(call, ending if call.head_sent else HEAD + ending, end_stream=True)
        if not call.input_closed:
            self.http2.reset(call)  # the peer need not send the rest: nobody reads it
        call.free()
        self._forget(call)

    def _write_out(self) -> bool:
        """Give the transport what the engine has; whether it takes more."""
        transport, out = self._transport, self.http2.out
        if transport is None:
            return False
        if out:
            data = b"".join(out)
            out.clear()
            transport.write(data)
            if self.is_paused and transport.get_write_buffer_size() > ABORT_BYTES:
                log.info("a peer does not read what it asks for; its connection is closed")
                transport.abort()
        return not self.is_paused

    # The end

    def _forget(self, call: Call) -> None:
        self._ready.pop(call.stream_id, None)
        self._blocked.pop(call.stream_id, None)
        if not self.http2.streams:
            self._idle_since = self._loop.time()

    def _drop_all(self) -> None:
        for call in self.calls:
            call.drop()
        self.http2.streams.clear()
        self._ready.clear()
        self._blocked.clear()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a call failed", exc_info=task.exception())
        if self._transport is None:
            self._report_when_gone()

    def _check(self) -> None:
        """Look now and then whether the peer is there and still needs the connection."""
        now, idle_seconds = self._loop.time(), self._options.idle_seconds
        wait = min(KEEPALIVE_SECONDS, idle_seconds)
        if not self.http2.has_met_peer:
            left = self._idle_since + self._options.handshake_seconds - now
            if left <= 0:
                self._give_up("has not begun HTTP/2 in time")
                return
            wait = min(wait, left)
        elif self.http2.streams:
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
            self.http2.ping(_KEEPALIVE_PING)
            self.schedule_flush()

    def _give_up(self, why: str) -> None:
        log.info("a peer %s; its connection is closed", why)
        self.abort()

    def _drained(self) -> None:
        self._no_more_calls = True
        self.schedule_flush()

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, callback)

    def _break_off(self) -> None:
        """Say what was wrong, as far as the engine has prepared it, and close."""
        self._drop_all()
        if self._transport is not None and not self._transport.is_closing():
            self._write_out()
            self._transport.close()
            # What the peer does not read would keep the connection open.
            self._set_timer(LINGER_SECONDS, self.abort)

    def _close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.http2.close()
            self._break_off()

    def _report_when_gone(self) -> None:
        if self._transport is None and not self._tasks:
            self._on_gone(self)
