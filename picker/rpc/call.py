"""One call on an HTTP/2 connection, with its buffers, and methods as coroutines on top of it.

While much is unsent, or the receiver has paused reading, messages wait here, unacknowledged, so a
peer can have at most one window of data and one unfinished message here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from picker.rpc.calls import Abort, Metadata, Method, Receiver, RpcError, Status
from picker.rpc.framing import PREFIX, MessageSplitter, trailers
from picker.rpc.http2.engine import Http2Stream
from picker.rpc.http2.headers import encode_fields

if TYPE_CHECKING:
    from picker.rpc.connection import GrpcConnection

log = logging.getLogger(__name__)

T = TypeVar("T")

# Creates the receiver of a new call. It must be quick, and may send and end the call at once.
Served: TypeAlias = Callable[["Call", Metadata], Receiver]

MAX_UNREAD_BYTES = 256 * 1024  # beyond it a coroutine's call is paused
MESSAGE_BYTES = 64  # the overhead of an unread message, even of an empty one
MAX_UNSENT_BYTES = 256 * 1024  # beyond it `write` waits, and messages are held back
# Smaller amounts accumulate, because a window update costs more. All streams of a connection
# together must stay below the connection's window, or it would never open again.
ACKNOWLEDGE_BYTES = 2048

HEAD: Final = encode_fields(((b":status", b"200"), (b"content-type", b"application/grpc")))
_OK_TRAILERS: Final = trailers(Status.OK, "")


class Call(Http2Stream, eq=False, kw_only=True):
    """Owns the buffers of one call. Its one receiver sends with `send` and `end`."""

    outlet: GrpcConnection
    splitter: MessageSplitter
    opened_at: float
    timer: asyncio.TimerHandle | None = None  # the caller's deadline
    head_sent: bool = False
    ending: bytes | None = None  # the header block sent last, once nothing else is unsent
    gone: bool = False  # the peer has reset the stream, or the connection is lost
    reads_on: bool = False  # messages are delivered even while much is unsent
    room: asyncio.Future[None] | None = None  # a writer waits for it
    # Data that waits for the peer's window or for the transport.
    unsent: bytearray = msgspec.field(default_factory=bytearray)
    _receiver: Receiver | None = None  # before `open`, and after `free`
    _messages: deque[bytes] | None = None  # messages held back, while there are any
    _is_reading_paused: bool = False
    _has_refused: bool = False  # a message without room that has begun
    _unacknowledged: int = 0
    _input_ended: bool = False

    # Called by the receiver

    def open(self, served: Served, headers: Metadata) -> None:
        try:
            self._receiver = served(self, headers)
        except Exception:
            log.exception("a call failed")
            self.end(Status.INTERNAL, "internal error")

    def send(self, message: bytes) -> None:
        """Send a message; it is dropped if the call is over."""
        if self.gone or self.ending is not None:
            return
        outlet, head = self.outlet, PREFIX.pack(0, len(message))
        if not self.unsent and not outlet.is_paused:
            http2 = outlet.http2
            if not self.head_sent:
                self.head_sent = True
                http2.send_headers(self, HEAD)
            if http2.send_data(self, head, message):
                if not outlet.is_flush_due:
                    outlet.schedule_flush()
                return
        self.unsent += head
        self.unsent += message
        if self.is_congested and not self.reads_on:
            self._hold_back()
        outlet.schedule(self)

    def end(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call after all data is sent; no messages are received any longer."""
        if self.ending is None and not self.gone:
            self.ending = trailers(status, text) if status or text else _OK_TRAILERS
            self.splitter.discard()
            self._messages = None
            self.outlet.schedule(self)

    def pause_reading(self) -> None:
        self._is_reading_paused = True
        self._hold_back()

    def resume_reading(self) -> None:
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._catch_up()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.outlet.spawn(coroutine)

    @property
    def peer(self) -> str:
        return self.outlet.peer

    @property
    def is_congested(self) -> bool:
        return len(self.unsent) > MAX_UNSENT_BYTES

    # Called by the connection

    def refuse(self, block: bytes) -> None:
        """Answer a request that is not a gRPC call with this header block alone."""
        self.head_sent, self.ending = True, block
        self.outlet.schedule(self)

    def take(self, limit: int) -> bytes:
        unsent, was_congested = self.unsent, self.is_congested
        taken = bytes(unsent[:limit])
        del unsent[:limit]
        if was_congested and not self.is_congested:
            _wake(self.room)
            # Deferred: the connection is in the middle of sending.
            asyncio.get_running_loop().call_soon(self._catch_up)
        return taken

    def break_off(self, why: Abort, status: Status, text: str) -> None:
        """End the call from outside: unsent data is dropped, and the receiver is only notified."""
        self.unsent.clear()
        if self.ending is None and not self.gone:
            if self._receiver is not None:
                self._receiver.abort(why)
            self.end(status, text)
        elif not self.gone:
            self.outlet.schedule(self)  # the end waited for the dropped data

    def drop(self) -> None:
        """Release everything, because the peer is gone."""
        if not self.gone:
            self.gone = True
            if self.ending is None and self._receiver is not None:
                self._receiver.abort(Abort.CANCELLED)
            self.free()

    def free(self) -> None:
        """Release all buffers, because the engine has the last frame or nothing can be sent."""
        self.gone = True
        left, self._unacknowledged = self._unacknowledged, 0
        if left:
            # The connection's window has to open again, also for a stream that is over.
            self.outlet.http2.acknowledge(self, left)
        self.splitter.discard()
        self._messages = None
        self.unsent.clear()
        self._receiver = None  # which refers to this
        if self.room is not None:
            _wake(self.room)
        if self.timer is not None:
            self.timer.cancel()

    # Called for the peer; see `Http2Stream`

    def on_data(self, data: bytes, flow_controlled_bytes: int) -> None:
        self._unacknowledged += flow_controlled_bytes
        if self.ending is None and not self.gone:
            try:
                messages = self.splitter.feed(data)
            except RpcError as failure:
                self._fail(failure)
            else:
                if self._messages is None and self._receiver is not None and len(messages) == 1:
                    self._receiver.message(messages[0])  # the usual case, without another call
                else:
                    self._hand_on(messages)
                if self.splitter.lacks_room:
                    self._catch_up()
        if self._unacknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledge()

    def on_end(self) -> None:
        self._input_ended = True
        if self.ending is None and not self.gone:
            self._catch_up()

    def on_reset(self) -> None:
        is_unanswered = not self.head_sent and not self.unsent
        self.drop()
        self.outlet.on_reset(self, is_unanswered)

    def on_window(self) -> None:
        if self.unsent:
            self.outlet.schedule(self)

    # Shared

    def _hand_on(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            if self._messages is not None:
                self._messages.append(message)
            elif self.ending is None and self._receiver is not None:
                self._receiver.message(message)

    def _hold_back(self) -> None:
        if self._messages is None:
            self._messages = deque()

    def _catch_up(self) -> None:
        """Deliver the messages held back, as far as possible now, and then the end."""
        held = self._messages
        if held is not None:
            if self._is_reading_paused or (self.is_congested and not self.reads_on):
                return
            self._messages = None
            self._hand_on(held)
        receiver = self._receiver
        if self.ending is not None or receiver is None or self._messages is not None:
            return
        splitter = self.splitter
        if splitter.lacks_room and not self._has_refused:
            self._has_refused = receiver.refuses_large_message()
            if not self._has_refused:
                splitter.make_room()
        if self._unacknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledge()
        if self._input_ended and self.ending is None:
            if splitter.is_between_messages:
                receiver.end_of_messages()
            else:
                self._fail(RpcError(Status.INTERNAL, "the stream ended within a message"))

    def _acknowledge(self) -> None:
        # Held messages stay unacknowledged, so that the peer's window bounds them.
        if self._messages is None and not self.splitter.lacks_room:
            count, self._unacknowledged = self._unacknowledged, 0
            self.outlet.http2.acknowledge(self, count)
            self.outlet.schedule_flush()

    def _fail(self, failure: RpcError) -> None:
        if self._receiver is not None:
            self._receiver.abort(Abort.BROKEN)
        self.end(failure.status, str(failure))


def streaming(method: Method) -> Served:
    """Return a server for a coroutine function; each call runs it in its own task."""
    return lambda call, metadata: _MethodCall(call, method)


class _MethodCall:
    """Implements `Receiver` for a coroutine. Owns its task and the messages it has not read."""

    def __init__(self, call: Call, method: Method) -> None:
        self._call = call
        self._messages: deque[bytes] = deque()
        self._unread_bytes = 0
        self._has_ended = False
        self._failure: RpcError | None = None
        self._more: asyncio.Future[None] | None = None  # the reader waits for it
        call.reads_on = True  # a method may read in one task and write in another
        self._task = call.spawn(self._run(method))

    async def _run(self, method: Method) -> None:
        try:
            await method(self._read, self._write)
        except RpcError as error:
            self._call.end(error.status, str(error))
        except asyncio.CancelledError:
            self._call.end(Status.CANCELLED, "cancelled")
            raise
        except Exception:
            log.exception("a call failed")
            self._call.end(Status.INTERNAL, "internal error")
        else:
            self._call.end()

    async def _read(self) -> bytes | None:
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                return None
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        message = self._messages.popleft()
        self._unread_bytes -= len(message) + MESSAGE_BYTES
        if self._unread_bytes <= MAX_UNREAD_BYTES:
            self._call.resume_reading()
        return message

    async def _write(self, message: bytes) -> None:
        call = self._call
        if call.gone or call.ending is not None:
            raise RpcError(Status.CANCELLED, "cannot write: the call is over")
        call.send(message)
        while call.is_congested:
            call.room = asyncio.get_running_loop().create_future()
            await call.room

    def message(self, data: bytes) -> None:
        self._messages.append(data)
        self._unread_bytes += len(data) + MESSAGE_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._call.pause_reading()
        _wake(self._more)

    def end_of_messages(self) -> None:
        self._has_ended = True
        _wake(self._more)

    def refuses_large_message(self) -> bool:
        """Fail the call; only ext_proc can answer a client for whose body there is no room."""
        self._failure = RpcError(Status.RESOURCE_EXHAUSTED, "there is no room for this message")
        _wake(self._more)
        return True

    def abort(self, why: Abort) -> None:
        self._task.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
