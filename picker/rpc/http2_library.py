"""HTTP/2 by the `h2` library, set up for a gRPC server: the slow twin of `http2_frames`.

Two things of the library are changed, because a proxy keeps many calls on one connection:

- A GOAWAY of the peer announces that it will open no more streams; those that are open go on. The
  library takes it for the end of the connection.
- Open streams are counted exactly near the limit only. The library walks all streams for each new
  one, which with a thousand open streams would cost more than serving the call.
"""

from __future__ import annotations

from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from picker.rpc.calls import joined
from picker.rpc.http2 import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_BYTES,
    STREAM_WINDOW_BYTES,
    Fields,
    Http2Error,
    Http2Listener,
)
from picker.rpc.http2_wire import ErrorCode

_DEFAULT_WINDOW_BYTES = 65_535
_RECOUNT_EVERY = 64  # new streams


class LibraryEngine:
    """Implements `Http2Engine` on an `H2Connection`."""

    def __init__(self, listener: Http2Listener) -> None:
        self._listener = listener
        self._http2 = _GrpcHttp2()
        self.has_met_peer = False

    @property
    def max_frame_bytes(self) -> int:
        """Of one DATA frame to the peer."""
        return int(self._http2.max_outbound_frame_size)

    def start(self) -> None:
        """Queue the settings and open the connection's window."""
        self._http2.initiate_connection()

    def receive(self, data: bytes) -> None:
        """Take bytes of the peer, cut anywhere. Raises `Http2Error`."""
        try:
            for event in self._http2.receive_data(data):
                self._tell(event)
        except ProtocolError as error:
            raise Http2Error(str(error)) from error

    def data_to_send(self) -> bytes:
        """What is to be sent since the last call."""
        return bytes(self._http2.data_to_send())

    def window(self, stream_id: int) -> int:
        """How many bytes of content may be sent on a stream now; 0 for one that is closed."""
        try:
            return int(self._http2.local_flow_control_window(stream_id))
        except ProtocolError:
            return 0

    def send_headers(self, stream_id: int, fields: Fields, end_stream: bool = False) -> None:
        """Queue a header block; names are lower case."""
        self._http2.send_headers(stream_id, fields, end_stream=end_stream)

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Queue content, at most `max_frame_bytes` and what `window` allows."""
        self._http2.send_data(stream_id, data)

    def acknowledge(self, stream_id: int, count: int) -> None:
        """`count` flow-controlled bytes were dealt with; the stream may be closed."""
        self._http2.acknowledge_received_data(count, stream_id)

    def reset(self, stream_id: int) -> None:
        """Tell the peer to send no more on a stream (NO_ERROR)."""
        self._http2.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def ping(self, data: bytes) -> None:
        """Ask for `on_ping_answered` with these eight bytes."""
        self._http2.ping(data)

    def close(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Queue the last GOAWAY."""
        self._http2.close_connection(ErrorCodes(code))

    def _tell(self, event: events.Event) -> None:
        listener = self._listener
        match event:
            case events.RequestReceived():
                listener.on_request(_id(event), joined(event.headers))
            case events.DataReceived():
                if not event.flow_controlled_length and event.stream_ended is None:
                    listener.on_chore()
                listener.on_data(_id(event), event.data, event.flow_controlled_length)
            case events.StreamEnded():
                listener.on_end(_id(event))
            case events.StreamReset():
                listener.on_reset(_id(event))
            case events.WindowUpdated():
                listener.on_window(event.stream_id or 0)
            case events.RemoteSettingsChanged():
                self.has_met_peer = True
                listener.on_chore()
                listener.on_window(0)  # the initial window, which open streams have too
            case events.PingAckReceived():
                listener.on_ping_answered(event.ping_data)
            case events.PingReceived() | events.PriorityUpdated() | events.UnknownFrameReceived():
                listener.on_chore()
            case events.ConnectionTerminated():
                listener.on_goodbye(int(event.error_code or 0))
            case _:
                pass


def _id(event: Any) -> int:
    return int(event.stream_id)


class _GrpcHttp2(H2Connection):
    def __init__(self) -> None:
        # What we send is ours and in order. Of what we receive four fields are looked at, by exact
        # name, and nothing is forwarded; to check the rest would cost as much as to decode it.
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
            )
        )
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
            },
        )
        self.decoder.max_header_list_size = MAX_HEADER_LIST_BYTES
        self._counted = 0
        self._since_counted = 0

    def initiate_connection(self) -> None:
        """Queue the settings and open the connection's window."""
        super().initiate_connection()
        self.increment_flow_control_window(CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)

    @property
    def open_inbound_streams(self) -> int:
        """Open streams of the peer, at most `MAX_CONCURRENT_STREAMS` when that is exact.

        Between two counts it is an upper bound. A count also frees what closed streams hold.
        """
        self._since_counted += 1
        bound = self._counted + self._since_counted
        if self._since_counted < _RECOUNT_EVERY and bound < MAX_CONCURRENT_STREAMS:
            return bound
        self._counted = super().open_inbound_streams
        self._since_counted = 0
        return self._counted

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        event = events.ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]
