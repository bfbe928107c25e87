"""One call on an HTTP/2 connection: what a method reads and writes, with its buffers.

Both buffers are bounded. Received data is acknowledged only while few bytes wait to be read and
the unfinished message has room in the budget, so that a peer may have one window of data and that
message here. `write` waits while much is
left to send. All of it runs in the event loop of the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from picker.extproc.body_budget import BodyBudget, no_room
from picker.extproc.pump import StreamFailedError
from picker.rpc.calls import RpcError, Status
from picker.rpc.framing import MessageSplitter, prefix

Headers = tuple[tuple[bytes, bytes], ...]

MAX_UNREAD_BYTES = 256 * 1024  # beyond it received data is not acknowledged
MESSAGE_BYTES = 64  # what keeping an unread message costs beside its content; empty ones cost too
MAX_UNSENT_BYTES = 256 * 1024  # beyond it `write` waits
# Smaller amounts wait for more: a window's update costs more than they do. All streams of a
# connection together must stay below the connection's window, or it would never open again.
ACKNOWLEDGE_BYTES = 2048


class Outlet(Protocol):
    """What a call needs of its connection."""

    def acknowledge(self, stream_id: int, count: int) -> None:
        """`count` flow-controlled bytes have been dealt with."""
        ...

    def schedule(self, stream: CallStream) -> None:
        """`stream` has something to send."""
        ...


class CallStream:
    """Owns the buffers of one call. One reader and one writer at a time.

    The connection feeds it and takes from it; the method's task reads and writes.
    """

    __slots__ = (
        "_failure",
        "_has_warned",
        "_input_ended",
        "_messages",
        "_more",
        "_outlet",
        "_room",
        "_splitter",
        "_unacknowledged",
        "_unread_bytes",
        "_unsent",
        "ending",
        "gone",
        "head_sent",
        "opened_at",
        "stream_id",
        "task",
        "timer",
    )

    def __init__(
        self,
        stream_id: int,
        outlet: Outlet,
        max_message_bytes: int,
        bodies: BodyBudget,
        opened_at: float,
    ) -> None:
        self.stream_id = stream_id
        self.task: asyncio.Task[None] | None = None  # none for a call that is refused at once
        self.timer: asyncio.TimerHandle | None = None  # the caller's deadline
        self.opened_at = opened_at
        self.head_sent = False
        self.ending: Headers | None = None  # what is sent last, once nothing else is unsent
        self.gone = False  # the peer has reset the stream, or the connection is lost
        self._outlet = outlet
        self._splitter = MessageSplitter(max_message_bytes, bodies)
        self._messages: deque[bytes] = deque()
        self._has_warned = False  # the reader knows that there is no room
        self._unread_bytes = 0
        self._unacknowledged = 0
        self._input_ended = False
        self._failure: RpcError | None = None
        self._more: asyncio.Future[None] | None = None  # the reader waits for it
        self._unsent = bytearray()
        self._room: asyncio.Future[None] | None = None  # the writer waits for it

    @property
    def failure(self) -> RpcError | None:
        """What the peer did wrong with its messages, when it did."""
        return self._failure

    @property
    def input_ended(self) -> bool:
        """Whether the peer has closed its side."""
        return self._input_ended

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the peer's window."""
        return len(self._unsent)

    # The connection's side

    def feed(self, data: bytes, flow_controlled_bytes: int) -> None:
        """Take the content of a DATA frame."""
        self._unacknowledged += flow_controlled_bytes
        if self._failure is None and self.ending is None:
            try:
                messages = self._splitter.feed(data)
            except RpcError as failure:
                self._failure = failure
                self._splitter.discard()
                messages = []
            for message in messages:
                self._messages.append(message)
                self._unread_bytes += len(message) + MESSAGE_BYTES
            if messages or self._failure is not None or self._splitter.lacks_room:
                _wake(self._more)
        self._acknowledge()

    def end_input(self) -> None:
        """The peer closed its side."""
        self._input_ended = True
        if not self._splitter.between_messages and self._failure is None:
            self._failure = RpcError(Status.INTERNAL, "the stream ended within a message")
        _wake(self._more)

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes to send."""
        unsent = self._unsent
        if len(unsent) <= limit:
            taken = bytes(unsent)
            unsent.clear()
        else:
            taken = bytes(memoryview(unsent)[:limit])
            del unsent[:limit]
        if len(unsent) <= MAX_UNSENT_BYTES:
            _wake(self._room)
        return taken

    def end(self, ending: Headers) -> None:
        """Send `ending` after what is unsent; nothing can be written any more."""
        if self.ending is None and not self.gone:
            self.ending = ending
            self._splitter.discard()
            self._outlet.schedule(self)

    def drop(self) -> int:
        """Nobody is at the other end any more.

        Returns the bytes that the connection has still to acknowledge.
        """
        self.gone = True
        left, self._unacknowledged = self._unacknowledged, 0
        self._messages.clear()
        self._splitter.discard()
        self._unsent.clear()
        return left

    def discard_unsent(self) -> None:
        """Give up what the peer has not made room for."""
        self._unsent.clear()

    # The method's side

    async def read(self) -> bytes | None:
        """The next message, None after the last one; see `rpc.Read`. Raises `RpcError` for one that
        is no good.
        """
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._splitter.lacks_room:
                self._has_warned = not self._has_warned
                if self._has_warned:
                    raise no_room()
                self._splitter.make_room()
                self._acknowledge()
            if self._input_ended:
                return None
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        message = self._messages.popleft()
        self._unread_bytes -= len(message) + MESSAGE_BYTES
        self._acknowledge()
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; waits while too much is unsent. Raises `StreamFailedError`."""
        if self.gone or self.ending is not None:
            raise StreamFailedError("cannot write: the stream is closed", peer_at_fault=True)
        self._unsent += prefix(message)
        self._unsent += message
        self._outlet.schedule(self)
        while len(self._unsent) > MAX_UNSENT_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _acknowledge(self) -> None:
        if self._unacknowledged < ACKNOWLEDGE_BYTES or self._splitter.lacks_room:
            return
        if self._unread_bytes <= MAX_UNREAD_BYTES:
            count, self._unacknowledged = self._unacknowledged, 0
            self._outlet.acknowledge(self.stream_id, count)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
