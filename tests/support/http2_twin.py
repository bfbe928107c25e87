"""What the `h2` library makes of a client's bytes: the oracle of our own HTTP/2 engine."""

from __future__ import annotations

from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from picker.rpc.calls import joined
from picker.rpc.http2.engine import (
    CONNECTION_WINDOW_BYTES,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_BYTES,
    STREAM_WINDOW_BYTES,
)
from picker.rpc.http2.frames import DEFAULT_WINDOW_BYTES


class LibraryTwin:
    """The library's server with the settings of ours; `events` has what the client did, and
    `chores` how often it made work for nothing.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.chores = 0
        unchecked = {"validate_inbound_headers": False, "normalize_inbound_headers": False}
        self.http2 = H2Connection(
            H2Configuration(client_side=False, header_encoding=None, **unchecked)
        )
        self.http2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_CONCURRENT_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
            },
        )
        self.http2.decoder.max_header_list_size = MAX_HEADER_LIST_BYTES
        self.http2.initiate_connection()
        self.http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)

    def receive(self, data: bytes) -> None:
        """Take bytes of the client, cut anywhere."""
        for event in self.http2.receive_data(data):
            self._note(event)

    def _note(self, event: events.Event) -> None:
        match event:
            case events.RequestReceived():
                self.events.append(("request", event.stream_id, joined(event.headers or [])))
            case events.DataReceived():
                length = event.flow_controlled_length
                if length:
                    self.events.append(("data", event.stream_id, event.data, length))
                elif event.stream_ended is None:
                    self.chores += 1
            case events.StreamEnded():
                self.events.append(("end", event.stream_id))
            case events.StreamReset():
                self.events.append(("reset", event.stream_id))
            case events.WindowUpdated():
                if event.stream_id:
                    self.events.append(("window", event.stream_id))
            case events.PingAckReceived():
                self.events.append(("pong", event.ping_data))
            case (
                events.PingReceived()
                | events.PriorityUpdated()
                | events.UnknownFrameReceived()
                | events.RemoteSettingsChanged()
            ):
                self.chores += 1
            case _:
                pass
