"""One HTTP/2 connection of gRPC calls: between asyncio's bytes and the calls, in both directions.

Output accumulates in the engine; the transport gets all of it once per turn of the event loop.
Calls take turns; the output of each waits in its own buffer for the peer's window and the socket.

A connection ends gracefully when it drains and its last call is over, or at once if it breaks.
Calls that cross our GOAWAY are served: the answer to a PING behind it shows that the peer has read
it, and only then does the end of the last call end the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from picker.rpc.call import HEAD, Call, Served
from picker.rpc.calls import Abort, Metadata, Status
from picker.rpc.framing import MessageSplitter, timeout_seconds
from picker.rpc.http2.engine import Http2Engine, Http2Error
from picker.rpc.http2.frames import ErrorCode, graceful_goaway
from picker.rpc.http2.headers import encode_fields
from picker.rpc.options import ServerOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEPALIVE_SECONDS = 60.0  # of silence before a PING to a peer with calls, and for its answer
LINGER_SECONDS = 5.0
DRAIN_SECONDS = 1.0  # the time for a peer to confirm our GOAWAY
HIGH_WATER_BYTES = 1024 * 1024  # unsent by the transport: calls wait
# Unsent by the transport although calls wait: the peer does not read. More than the high water mark
# and one call's turn, so that only control frames can reach it.
ABORT_BYTES = 4 * 1024 * 1024
TURN_BYTES = 128 * 1024  # of one call, before it is another's turn
WRITE_BYTES = 256 * 1024  # given to the transport at once
_NOT_POST: Final = encode_fields(((b":status", b"405"), (b"allow", b"POST")))
_NOT_GRPC: Final = encode_fields(((b":status", b"415"),))
_DRAIN_PING = b"draining"
_KEEPALIVE_PING = b"all well"
# Calls that the peer resets before any reply, shortly after opening them, and frames that only
# cause work. One Envoy worker whose clients all disconnect at once resets 3,300 calls a second
# (measured); nearly all resets arrive in one read with the opening frames, so that only their
# number distinguishes them from an attack, of which this process withstands 100,000 a second
# (13,000 on `h2`). The burst is what such an Envoy sends to a picker that was stopped for 6 s.
YOUNG_SECONDS = 1.0
WASTE_PER_SECOND = 10_000
WASTE_BURST = 20_000


class GrpcConnection(asyncio.Protocol):
    """Owns one connection and its calls. Implements `Http2Listener`.

    `on_made` is called once, when the connection is established, and then `on_gone` once, when it
    is closed and its last task has ended.
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
        self._ready: dict[int, Call] = {}  # calls with unsent data, in order
        self._blocked: dict[int, Call] = {}  # calls that wait for the connection's window
        self._timer: asyncio.TimerHandle | None = None  # for an idle peer
        self._last_received_at = self._idle_since = self._loop.time()
        # A token bucket: the work that the peer may waste now.
        self._waste_left, self._waste_filled_at = float(WASTE_BURST), self._last_received_at
        self._asked_at: float | None = None  # the time of an unanswered PING
        self._draining = False
        self._no_more_calls = False  # the peer has read our GOAWAY
        self._cancelled = False

    @property
    def peer(self) -> str:
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        # The name of an IPv6 peer has four parts.
        return "{}:{}".format(*name[:2]) if isinstance(name, tuple) else "a unix socket"

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(cast("Iterable[Call]", self.http2.streams.values()))

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.http2.start()
        first = min(self._options.handshake_seconds, self._options.idle_seconds)
        self._set_timer(first, self._check)
        self._on_made(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._last_received_at = self._loop.time()
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
        """Close the connection now; the transport would first send data that no peer may read."""
        self._break_off()
        return False

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.schedule_flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._drop_all()
        self._report_when_gone()

    # Called by the server

    def drain(self) -> None:
        """Ask the peer to open no more calls, and close after the last one."""
        transport = self._transport
        if self._draining or transport is None or transport.is_closing():
            return
        self._draining = True
        # Not `close`, which would name the last stream: calls that cross this are served.
        self.http2.out.append(graceful_goaway())
        self.http2.ping(_DRAIN_PING)
        self._set_timer(DRAIN_SECONDS, self._drained)
        self.schedule_flush()

    def cancel(self) -> None:
        self._cancelled = True
        for call in self.calls:
            call.break_off(Abort.SHUTDOWN, Status.UNAVAILABLE, "shutting down")
        self.drain()
        self._drained()  # later calls would be refused: no reason to wait

    def abort(self) -> None:
        """Close at once, without a GOAWAY, because the peer does not read."""
        if self._transport is not None:
            self._transport.abort()

    # Called by calls

    def schedule(self, call: Call) -> None:
        self._ready[call.stream_id] = call
        if not self.is_flush_due:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        if not self.is_flush_due and self._transport is not None:
            self.is_flush_due = True
            self._loop.call_soon(self._flush)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine, name="grpc call")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def on_reset(self, call: Call, is_unanswered: bool) -> None:
        self._forget(call)
        if is_unanswered and self._last_received_at - call.opened_at < YOUNG_SECONDS:
            self.on_chore()

    # Called for the peer; see `Http2Listener`

    def on_request(self, stream_id: int, send_window: int, headers: Metadata) -> Call:
        options, now = self._options, self._last_received_at
        splitter = MessageSplitter(options.max_message_bytes, options.budget)
        call = Call(stream_id, send_window, outlet=self, splitter=splitter, opened_at=now)
        if headers.get(b":method") != b"POST":
            call.refuse(_NOT_POST)
        elif not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            call.refuse(_NOT_GRPC)
        elif self._cancelled:
            call.end(Status.UNAVAILABLE, "shutting down")
        elif (served := self._served.get(path := headers.get(b":path", b""))) is None:
            call.end(Status.UNIMPLEMENTED, f"unknown method {path.decode('ascii', 'replace')}")
        else:
            if b"grpc-timeout" in headers:
                seconds = timeout_seconds(headers[b"grpc-timeout"])
                if seconds is not None:
                    late = (Abort.CANCELLED, Status.DEADLINE_EXCEEDED, "deadline exceeded")
                    call.timer = self._loop.call_later(seconds, call.break_off, *late)
            call.open(served, headers)
        return call

    def on_chore(self) -> None:
        """Count work that the peer wastes. Raises `Http2Error` if it is too much."""
        now = self._last_received_at
        refilled = self._waste_left + (now - self._waste_filled_at) * WASTE_PER_SECOND
        self._waste_left, self._waste_filled_at = min(refilled, WASTE_BURST) - 1, now
        if self._waste_left < 0:
            self.http2.close(ErrorCode.ENHANCE_YOUR_CALM)
            raise Http2Error("it wastes work: resets, pings or other frames without end")

    def on_window(self) -> None:
        self._ready |= self._blocked
        self._blocked.clear()

    def on_ping_answered(self, data: bytes) -> None:
        if data == _DRAIN_PING:
            self._drained()

    def on_goaway(self, error_code: int) -> None:
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
            self.is_flush_due = True  # later output is written below
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
        """Serve calls in turn until all data is sent or the transport is full."""
        moved = 0
        while self._ready:
            for call in tuple(self._ready.values()):
                moved += self._send_turn(call)
                if moved >= WRITE_BYTES:
                    moved = 0
                    if not self._write_out():
                        return

    def _send_turn(self, call: Call) -> int:
        """Move one call's share to the engine; return the number of bytes."""
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
                ending = call.ending if call.head_sent else HEAD + call.ending
                http2.send_headers(call, ending, end_stream=True)
                if not call.input_closed:
                    http2.reset(call)  # the rest of the request is not read
                call.free()
                self._forget(call)
        elif http2.window(call) <= 0:
            del self._ready[call.stream_id]
            self._blocked[call.stream_id] = call
        return moved

    def _write_out(self) -> bool:
        """Pass the engine's output to the transport; return whether it accepts more."""
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
        now, idle_seconds = self._loop.time(), self._options.idle_seconds
        wait = min(KEEPALIVE_SECONDS, idle_seconds)
        if not self.http2.has_met_peer:
            left = self._idle_since + self._options.handshake_seconds - now
            if left <= 0:
                self._give_up("has not begun HTTP/2 in time")
                return
            wait = min(wait, left)
        elif self.http2.streams:
            if self._asked_at is not None and self._last_received_at < self._asked_at:
                self._give_up("does not answer although it has calls")
                return
            self._asked_at = None
            if now - self._last_received_at >= KEEPALIVE_SECONDS:
                self._asked_at = now
                self.http2.ping(_KEEPALIVE_PING)
                self.schedule_flush()
        else:
            left = self._idle_since + idle_seconds - now
            if left <= 0:
                self.drain()
                return
            wait = min(wait, left)
        self._set_timer(wait, self._check)

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
        """Send the engine's last frames, which may name an error, and close."""
        self._drop_all()
        if self._transport is not None and not self._transport.is_closing():
            self._write_out()
            self._transport.close()
            # Unread output would keep the connection open.
            self._set_timer(LINGER_SECONDS, self.abort)

    def _close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.http2.close()
            self._break_off()

    def _report_when_gone(self) -> None:
        if self._transport is None and not self._tasks:
            self._on_gone(self)
