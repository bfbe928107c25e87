"""One call on an HTTP/2 connection, with its buffers, and methods as coroutines on top of it.

A call hands each message to its receiver as soon as it is whole. While much is unsent, or the
receiver has paused reading, messages wait here instead, and what has come is not acknowledged, so
that a peer may have one window of data and one unfinished message here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from picker.rpc.budget import ByteBudget
from picker.rpc.calls import Abort, Metadata, Method, Receiver, RpcError, Status
from picker.rpc.framing import PREFIX, MessageSplitter, trailers
from picker.rpc.http2.engine import Http2Engine, Http2Stream
from picker.rpc.http2.headers import encode_fields

log = logging.getLogger(__name__)

T = TypeVar("T")

# Opens the receiver of a new call. It must be quick, and may send and end the call at once.
Served: TypeAlias = Callable[["Call", Metadata], Receiver]

MAX_UNREAD_BYTES = 256 * 1024  # beyond it a coroutine's call is paused
MESSAGE_BYTES = 64  # what keeping an unread message costs beside its content; empty ones cost too
MAX_UNSENT_BYTES = 256 * 1024  # beyond it `write` waits, and messages are held back
# Smaller amounts wait for more: a window's update costs more than they do. All streams of a
# connection together must stay below the connection's window, or it would never open again.
ACKNOWLEDGE_BYTES = 2048

HEAD: Final = encode_fields(((b":status", b"200"), (b"content-type", b"application/grpc")))
_OK_TRAILERS: Final = trailers(Status.OK, "")


class Outlet(Protocol):
    """What a call needs of its connection."""

    http2: Http2Engine
    is_paused: bool  # the transport takes no more for now
    is_flush_due: bool  # what the engine has is written soon

    @property
    def peer(self) -> str:
        """Where the peer is, for the log."""
        ...

    def schedule(self, call: Call) -> None:
        """`call` has something to send that could not be sent at once, or its end."""
        ...

    def schedule_flush(self) -> None:
        """Something was given to the engine."""
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it; the connection is not gone before it is over."""
        ...

    def on_reset(self, call: Call, is_unanswered: bool) -> None:
        """The peer has ended `call`."""
        ...


class _Nobody:
    """The receiver of what is refused without being opened."""

    def message(self, data: bytes) -> None:
        """Nothing is received."""

    def end_of_messages(self) -> None:
        """Nothing is received."""

    def refuses_large_message(self) -> bool:
        """Nothing is received."""
        return True

    def abort(self, why: Abort) -> None:
        """Nothing runs."""


_NOBODY: Final = _Nobody()


class Call(Http2Stream):
    """Owns the buffers of one call. One receiver, which sends by `send` and `end`."""

    __slots__ = (
        "_has_refused",
        "_input_ended",
        "_is_reading_paused",
        "_messages",
        "_outlet",
        "_receiver",
        "_splitter",
        "_unacknowledged",
        "ending",
        "gone",
        "head_sent",
        "opened_at",
        "reads_on",
        "room",
        "timer",
        "unsent",
    )

    def __init__(
        self,
        stream_id: int,
        send_window: int,
        outlet: Outlet,
        max_message_bytes: int,
        budget: ByteBudget,
        opened_at: float,
    ) -> None:
        super().__init__(stream_id, send_window)
        self.timer: asyncio.TimerHandle | None = None  # the caller's deadline
        self.opened_at = opened_at
        self.head_sent = False
        self.ending: bytes | None = None  # the header block sent last, once nothing else is unsent
        self.gone = False  # the peer has reset the stream, or the connection is lost
        self.reads_on = False  # messages are handed on however much is unsent
        self.room: asyncio.Future[None] | None = None  # a writer waits for it
        self.unsent = bytearray()  # what waits for the peer's window or for the transport
        self._outlet = outlet
        self._receiver: Receiver = _NOBODY
        self._splitter = MessageSplitter(max_message_bytes, budget)
        self._messages: deque[bytes] | None = None  # those held back, while any have to be
        self._is_reading_paused = False
        self._has_refused = False  # a message that has begun, and for which there is no room
        self._unacknowledged = 0
        self._input_ended = False

    # The receiver's half

    def open(self, served: Served, headers: Metadata) -> None:
        """Open the receiver; called once, before anything else."""
        try:
            self._receiver = served(self, headers)
        except Exception:
            log.exception("a call failed")
            self.end(Status.INTERNAL, "internal error")

    def send(self, message: bytes) -> None:
        """Send a message; dropped on a call that is over."""
        if self.gone or self.ending is not None:
            return
        outlet, head = self._outlet, PREFIX.pack(0, len(message))
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
        """End the call once all is sent. Nothing is received any more."""
        if self.ending is None and not self.gone:
            self.ending = trailers(status, text) if status or text else _OK_TRAILERS
            self._splitter.discard()
            self._messages = None
            self._outlet.schedule(self)

    def pause_reading(self) -> None:
        """Hold messages back until `resume_reading`."""
        self._is_reading_paused = True
        self._hold_back()

    def resume_reading(self) -> None:
        """Hand on what was held back."""
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._catch_up()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run what the receiver cannot do at once. It is the receiver that cancels it."""
        return self._outlet.spawn(coroutine)

    @property
    def peer(self) -> str:
        """Where the caller is, for the log."""
        return self._outlet.peer

    @property
    def is_congested(self) -> bool:
        """True if so much is unsent that nothing should be added."""
        return len(self.unsent) > MAX_UNSENT_BYTES

    # The connection's half

    def refuse(self, block: bytes) -> None:
        """Answer what is no call of gRPC with this header block alone."""
        self.head_sent, self.ending = True, block
        self._outlet.schedule(self)

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes to send."""
        unsent, was_congested = self.unsent, self.is_congested
        taken = bytes(unsent[:limit])
        del unsent[:limit]
        if was_congested and not self.is_congested:
            _wake(self.room)
            # Not now: the connection is in the middle of sending.
            asyncio.get_running_loop().call_soon(self._catch_up)
        return taken

    def break_off(self, why: Abort, status: Status, text: str) -> None:
        """End the call from outside: what is unsent is given up, the receiver is not asked."""
        self.unsent.clear()
        if self.ending is None and not self.gone:
            self._receiver.abort(why)
            self.end(status, text)
        elif not self.gone:
            self._outlet.schedule(self)  # the end waited for what is given up now

    def drop(self) -> None:
        """There is no peer any more; free everything."""
        if not self.gone:
            self.gone = True
            if self.ending is None:
                self._receiver.abort(Abort.CANCELLED)
            self.free()

    def free(self) -> None:
        """Hold nothing: the last frame was given to the engine, or nothing can be sent."""
        self.gone = True
        left, self._unacknowledged = self._unacknowledged, 0
        if left:
            self._outlet.http2.acknowledge(self, left)
        self._splitter.discard()
        self._messages = None
        self.unsent.clear()
        self._receiver = _NOBODY  # which refers to this
        _wake(self.room)
        if self.timer is not None:
            self.timer.cancel()

    # What the peer does; see `Http2Stream`

    def on_data(self, data: bytes, flow_controlled_bytes: int) -> None:
        """Cut messages out of it, and hand them on."""
        self._unacknowledged += flow_controlled_bytes
        if self.ending is None and not self.gone:
            try:
                messages = self._splitter.feed(data)
            except RpcError as failure:
                self._fail(failure)
            else:
                self._hand_on(messages)
                if self._splitter.lacks_room:
                    self._catch_up()
        if self._unacknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledge()

    def on_end(self) -> None:
        """The peer closed its half."""
        self._input_ended = True
        if self.ending is None and not self.gone:
            self._catch_up()

    def on_reset(self) -> None:
        """The peer, or a breach of the protocol, ended the stream."""
        is_unanswered = not self.head_sent and not self.unsent
        self.drop()
        self._outlet.on_reset(self, is_unanswered)

    def on_window(self) -> None:
        """More can be sent."""
        if self.unsent:
            self._outlet.schedule(self)

    # Both

    def _hand_on(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            if self._messages is not None:
                self._messages.append(message)
            elif self.ending is None and not self.gone:
                self._receiver.message(message)

    def _hold_back(self) -> None:
        if self._messages is None:
            self._messages = deque()

    def _catch_up(self) -> None:
        """Hand on what was held back, as far as that is possible now, and then the end."""
        held = self._messages
        if held is not None:
            if self._is_reading_paused or (self.is_congested and not self.reads_on):
                return
            self._messages = None
            self._hand_on(held)
        if self.ending is not None or self.gone or self._messages is not None:
            return
        splitter = self._splitter
        if splitter.lacks_room and not self._has_refused:
            self._has_refused = self._receiver.refuses_large_message()
            if not self._has_refused:
                splitter.make_room()
        if self._unacknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledge()
        if self._input_ended and self.ending is None:
            if splitter.is_between_messages:
                self._receiver.end_of_messages()
            else:
                self._fail(RpcError(Status.INTERNAL, "the stream ended within a message"))

    def _acknowledge(self) -> None:
        if self._messages is None and not self._splitter.lacks_room:
            count, self._unacknowledged = self._unacknowledged, 0
            self._outlet.http2.acknowledge(self, count)
            self._outlet.schedule_flush()

    def _fail(self, failure: RpcError) -> None:
        self._receiver.abort(Abort.BROKEN)
        self.end(failure.status, str(failure))


def streaming(method: Method) -> Served:
    """Serve a method that is a coroutine: each call runs it in a task of its own."""
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
        """Keep it for the reader, which may be slow."""
        self._messages.append(data)
        self._unread_bytes += len(data) + MESSAGE_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._call.pause_reading()
        _wake(self._more)

    def end_of_messages(self) -> None:
        """The reader gets None."""
        self._has_ended = True
        _wake(self._more)

    def refuses_large_message(self) -> bool:
        """Only ext_proc has an answer for a client whose body finds no room."""
        self._failure = RpcError(Status.RESOURCE_EXHAUSTED, "there is no room for this message")
        _wake(self._more)
        return True

    def abort(self, why: Abort) -> None:
        """Nothing more can be said."""
        self._task.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
