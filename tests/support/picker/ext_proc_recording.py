"""Requests as an HTTP/2 client writes them to a picker, for reading without a socket."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from tests.support.picker.http2_peer import prefix

_WINDOW = 2**31 - 1
_CALL = (
    *((":method", "POST"), (":scheme", "http"), (":authority", "picker")),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    *(("te", "trailers"), ("content-type", "application/grpc"), ("x-envoy-internal", "true")),
)


class Sink(asyncio.Transport):
    def write(self, data: Any) -> None: ...

    def writelines(self, list_of_data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def _messages(index: int, content: str) -> list[bytes]:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    headers, whole, response = (pb.ProcessingRequest() for _ in range(3))
    for name, value in (
        *((":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http")),
        *((":authority", "127.0.0.1:8080"), ("content-type", "application/json")),
        *(("content-length", str(len(body))), ("user-agent", "benchmark"), ("accept", "*/*")),
        ("x-request-id", f"7b2cb3b6-0000-4000-8000-{index:012}"),
    ):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    mode = processing_mode_pb2.ProcessingMode
    headers.protocol_config.request_body_mode = mode.BUFFERED
    headers.protocol_config.response_body_mode = mode.NONE
    whole.request_body.body, whole.request_body.end_of_stream = body, True
    for name, value in (("status", "200"), ("content-type", "application/json")):
        key = ":status" if name == "status" else name
        response.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    serialized = (message.SerializeToString() for message in (headers, whole, response))
    return [prefix(message) + message for message in serialized]


def record(contents: Iterable[str]) -> tuple[bytes, list[list[bytes]]]:
    """Return a connection's first bytes, and the four pieces of each stream after it."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.local_settings.initial_window_size = _WINDOW
    client.initiate_connection()
    client.increment_flow_control_window(_WINDOW - 65_535)
    client.remote_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW})
    opening = client.data_to_send()
    streams = []
    for index, content in enumerate(contents):
        stream_id = 1 + 2 * index
        client.outbound_flow_control_window = _WINDOW  # the picker's window updates are not read
        client.send_headers(stream_id, _CALL)
        client.streams[stream_id].outbound_flow_control_window = _WINDOW
        pieces = []
        for message in _messages(index, content):
            for at in range(0, len(message), 16_384):
                client.send_data(stream_id, message[at : at + 16_384])
            pieces.append(client.data_to_send())
        client.end_stream(stream_id)
        streams.append([*pieces, client.data_to_send()])
    return opening, streams
