"""What a connection needs of an HTTP/2 implementation, and what it is told by one.

Two implement it: `http2_frames`, made for this program, and `http2_library` on the `h2` library,
its twin in the tests. Neither does any I/O: bytes go in, the listener is told what they mean, and
`data_to_send` has the bytes to go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from picker.errors import PickerError
from picker.rpc.http2_wire import ErrorCode

STREAM_WINDOW_BYTES = 1024 * 1024
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
MAX_CONCURRENT_STREAMS = 4096
MAX_HEADER_LIST_BYTES = 64 * 1024

Fields = Iterable[tuple[bytes, bytes]]


class Http2Error(PickerError):
    """The peer broke HTTP/2; what it is to be told is in `data_to_send`."""


class Http2Listener(Protocol):
    """Told what the peer did, in its order."""

    def on_request(self, stream_id: int, headers: Mapping[bytes, bytes]) -> None:
        """A stream was opened. Names are lower case; of a repeated one the last value counts."""
        ...

    def on_data(self, stream_id: int, data: bytes, flow_controlled_bytes: int) -> None:
        """Content, to be acknowledged with `flow_controlled_bytes` (padding counts)."""
        ...

    def on_end(self, stream_id: int) -> None:
        """The peer has closed its side of a stream."""
        ...

    def on_reset(self, stream_id: int) -> None:
        """A stream is over, nothing can be sent on it."""
        ...

    def on_window(self, stream_id: int) -> None:
        """More can be sent on a stream; 0: on all of them, perhaps."""
        ...

    def on_ping_answered(self, data: bytes) -> None:
        """The peer has read everything that was sent before the ping."""
        ...

    def on_chore(self) -> None:
        """A frame came that costs work and brings no call on: a ping, settings, a priority, empty
        content, one of an unknown kind, or a stream too many. May raise `Http2Error`.
        """
        ...

    def on_goodbye(self, error_code: int) -> None:
        """The peer opens no more streams; 0: those that are open go on."""
        ...


class Http2Engine(Protocol):
    """The server side of one connection. Call `start` first.

    `receive` raises what a listener raises; the connection is then broken.
    """

    @property
    def max_frame_bytes(self) -> int:
        """Of one DATA frame to the peer."""
        ...

    @property
    def has_met_peer(self) -> bool:
        """Whether the peer's preface and settings have come."""
        ...

    def start(self) -> None:
        """Queue the settings and open the connection's window."""
        ...

    def receive(self, data: bytes) -> None:
        """Take bytes of the peer, cut anywhere. Raises `Http2Error`."""
        ...

    def data_to_send(self) -> bytes:
        """What is to be sent since the last call."""
        ...

    def window(self, stream_id: int) -> int:
        """How many bytes of content may be sent on a stream now; 0 for one that is closed."""
        ...

    def send_headers(self, stream_id: int, fields: Fields, end_stream: bool = False) -> None:
        """Queue a header block; names are lower case."""
        ...

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Queue content, at most `max_frame_bytes` and what `window` allows."""
        ...

    def acknowledge(self, stream_id: int, count: int) -> None:
        """`count` flow-controlled bytes were dealt with; the stream may be closed."""
        ...

    def reset(self, stream_id: int) -> None:
        """Tell the peer to send no more on a stream (NO_ERROR)."""
        ...

    def ping(self, data: bytes) -> None:
        """Ask for `on_ping_answered` with these eight bytes."""
        ...

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Queue the last GOAWAY."""
        ...
