"""The `h2` library's connection, set up for a gRPC server.

Two things of it are changed, because a proxy keeps many calls on one connection:

- A GOAWAY of the peer announces that it will open no more streams; those that are open go on. The
  library takes it for the end of the connection.
- Open streams are counted exactly near the limit only. The library walks all streams for each new
  one, which with a thousand open streams would cost more than serving the call.
"""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

STREAM_WINDOW_BYTES = 1024 * 1024
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
MAX_CONCURRENT_STREAMS = 4096
MAX_HEADER_LIST_BYTES = 64 * 1024
_DEFAULT_WINDOW_BYTES = 65_535
_RECOUNT_EVERY = 64  # new streams
_LAST_STREAM_ID = 2**31 - 1


class GrpcHttp2(H2Connection):
    """The server side of one connection; call `initiate_connection` first."""

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

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]


def graceful_goaway() -> bytes:
    """Asks the peer to open no more streams here, and gives up none that is under way.

    The library can only close the connection with its own GOAWAY.
    """
    frame = GoAwayFrame(0, last_stream_id=_LAST_STREAM_ID, error_code=ErrorCodes.NO_ERROR)
    return frame.serialize()
