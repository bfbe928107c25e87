"""Moves what calls have to send to the HTTP/2 engine, in turns and within the peer's windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from picker.rpc.calls import Status
from picker.rpc.framing import status_text
from picker.rpc.http2 import Http2Engine
from picker.rpc.stream import CallStream, Headers

TURN_BYTES = 128 * 1024  # of one call, before it is another's turn
WRITE_BYTES = 256 * 1024  # given to the transport at once

_HEAD: Final[Headers] = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class SendQueue:
    """Owns the order in which calls send.

    `write_out` gives the transport what the engine has; returns whether the transport takes more.
    `on_ended` is told of a call whose last frame has been given to the engine.
    """

    def __init__(
        self,
        http2: Http2Engine,
        write_out: Callable[[], bool],
        on_ended: Callable[[CallStream], None],
    ) -> None:
        self._http2 = http2
        self._write_out = write_out
        self._on_ended = on_ended
        self._ready: dict[int, CallStream] = {}  # in order: who has something to send
        self._blocked: dict[int, CallStream] = {}  # who waits for the peer's window

    def add(self, stream: CallStream) -> bool:
        """`stream` has something to send; returns whether it may be sent now."""
        if stream.stream_id in self._blocked and stream.unsent_bytes:
            return False
        self._ready[stream.stream_id] = stream
        return True

    def unblock(self, stream_id: int) -> None:
        """The window of a stream has grown, or that of the connection (0)."""
        if stream_id:
            stream = self._blocked.pop(stream_id, None)
            if stream is not None:
                self._ready[stream_id] = stream
        else:
            self._ready |= self._blocked
            self._blocked.clear()

    def remove(self, stream_id: int) -> None:
        """Nothing more of this stream is to be sent."""
        self._ready.pop(stream_id, None)
        self._blocked.pop(stream_id, None)

    def send(self) -> None:
        """Serve calls in turn until all is sent or the transport is full."""
        moved = 0
        while self._ready:
            for stream in tuple(self._ready.values()):
                moved += self._send_turn(stream)
                if moved >= WRITE_BYTES:
                    moved = 0
                    if not self._write_out():
                        return

    def _send_turn(self, stream: CallStream) -> int:
        """Move one call's share to the engine; returns its bytes."""
        moved = 0
        http2, stream_id = self._http2, stream.stream_id
        if stream.unsent_bytes:
            if not stream.head_sent:
                stream.head_sent = True
                http2.send_headers(stream_id, _HEAD)
            allowed = min(http2.window(stream_id), TURN_BYTES)
            while allowed > 0 and stream.unsent_bytes:
                data = stream.take(min(allowed, http2.max_frame_bytes))
                http2.send_data(stream_id, data)
                allowed -= len(data)
                moved += len(data)
        if not stream.unsent_bytes:
            self.remove(stream_id)
            if stream.ending is not None:
                self._send_ending(stream, stream.ending)
        elif http2.window(stream_id) <= 0:
            del self._ready[stream_id]
            self._blocked[stream_id] = stream
        return moved

    def _send_ending(self, stream: CallStream, ending: Headers) -> None:
        opening = ending[0][0] == b":status"
        if not stream.head_sent and not opening:
            ending = _HEAD + ending
        self._http2.send_headers(stream.stream_id, ending, end_stream=True)
        if not stream.input_ended:
            # The peer need not send the rest: nobody reads it.
            self._http2.reset(stream.stream_id)
        self._on_ended(stream)


def trailers(status: Status, text: str) -> Headers:
    """How a call ends."""
    number = (b"grpc-status", str(int(status)).encode())
    return (number, (b"grpc-message", status_text(text))) if text else (number,)
