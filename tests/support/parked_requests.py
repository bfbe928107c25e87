"""Requests that wait in a whole picker, sent as bytes that were written beforehand.

Whatever a client of a library keeps of its requests would be taken for what the picker holds.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator, Sequence

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from picker.rpc.framing import prefix

WINDOW = 2**31 - 1
FRAME_BYTES = 16_384
PIECE_BYTES = 60_000
CALL = (
    *((":method", "POST"), (":scheme", "http"), (":authority", "picker")),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    *(("te", "trailers"), ("content-type", "application/grpc")),
)
HEADERS = (
    *((":method", "POST"), (":scheme", "http")),
    *((":authority", "127.0.0.1:8080"), ("content-type", "application/json")),
    *(("user-agent", "OpenAI/Python 1.99.0"), ("authorization", "Bearer " + "s" * 40)),
)


def recorded(bodies: Sequence[bytes], buffered: bool) -> tuple[bytes, list[bytes]]:
    """A connection's first bytes, and those of a stream for each request."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    client.increment_flow_control_window(WINDOW - 65_535)
    opening = client.data_to_send()
    client.remote_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    streams = []
    for index, body in enumerate(bodies):
        stream_id = 1 + 2 * index
        client.outbound_flow_control_window = WINDOW  # nobody reads the picker's updates
        client.send_headers(stream_id, CALL)
        client.streams[stream_id].outbound_flow_control_window = WINDOW
        for message in _messages(index, body, buffered):
            framed = prefix(message) + message
            for at in range(0, len(framed), FRAME_BYTES):
                client.send_data(stream_id, framed[at : at + FRAME_BYTES])
        streams.append(client.data_to_send())
    return opening, streams


def _messages(index: int, body: bytes, buffered: bool) -> Iterator[bytes]:
    modes = processing_mode_pb2.ProcessingMode
    headers = pb.ProcessingRequest()
    path = "/v1/completions" if b'"prompt"' in body else "/v1/chat/completions"
    own = ((":path", path), ("x-request-id", f"7b2cb3b6-0000-4000-8000-{index:012}"))
    for name, value in (*HEADERS, *own, ("content-length", str(len(body)))):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    mode = modes.BUFFERED if buffered else modes.FULL_DUPLEX_STREAMED
    headers.protocol_config.request_body_mode = mode
    headers.protocol_config.response_body_mode = modes.NONE
    yield headers.SerializeToString()
    size = len(body) if buffered else PIECE_BYTES
    for at in range(0, len(body), size):
        piece = pb.ProcessingRequest()
        piece.request_body.body = body[at : at + size]
        piece.request_body.end_of_stream = at + size >= len(body)
        yield piece.SerializeToString()


class Gateway:
    """One connection to the picker at a port; sends requests and reads no answers."""

    def __init__(self, bodies: Sequence[bytes], buffered: bool) -> None:
        self._opening, self._streams = recorded(bodies, buffered)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, port: int) -> None:
        """Open the connection."""
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._writer.write(self._opening)
        self._reading = asyncio.create_task(_drop(reader))

    async def send(self, first: int, last: int) -> None:
        """Send these requests."""
        assert self._writer is not None
        for stream in self._streams[first:last]:
            self._writer.write(stream)
            await self._writer.drain()

    async def close(self) -> None:
        """All clients have gone."""
        if self._writer is not None and self._reading is not None:
            self._writer.close()
            self._reading.cancel()
            await asyncio.wait([self._reading])


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


def traced_bytes() -> int:
    """What Python's allocators have given out and not got back."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
