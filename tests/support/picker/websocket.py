"""WebSockets on the wire, without frames: clients, and an endpoint that echoes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

SAID = [b"hello", b"x" * 100_000, b"bye"]
ECHOED = b"".join([b"welcome", *SAID])
_SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while b"upgrade: websocket" not in (await reader.readuntil(b"\r\n\r\n")).lower():
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.write(_SWITCHED + b"welcome")
    while data := await reader.read(65_536):
        writer.write(data)
    writer.close()


async def _served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await _echo(reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()  # the proxy is gone


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    server = await asyncio.start_server(_served, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def over_http1(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n"
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    echoed = await reader.readexactly(len(b"welcome"))
    for data in SAID:
        writer.write(data)
        echoed += await reader.readexactly(len(data))
    writer.close()
    return echoed


async def over_http2(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    http.initiate_connection()
    writer.write(http.data_to_send())
    echoed, wanted, said = bytearray(), len(b"welcome"), list(SAID)
    left = bytearray()
    while len(echoed) < wanted or said or left:
        for event in http.receive_data(await reader.read(65_536)):
            if isinstance(event, events.RemoteSettingsChanged):
                headers = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http")]
                headers += [(":path", "/v1/realtime"), (":authority", "a")]
                http.send_headers(1, headers, end_stream=False)
            elif isinstance(event, events.ResponseReceived):
                assert dict(event.headers)[":status"] == "200"
            elif isinstance(event, events.DataReceived):
                echoed += event.data
                http.acknowledge_received_data(event.flow_controlled_length, 1)
        if len(echoed) == wanted and said:
            left += said.pop(0)
            wanted += len(left)
        while left and (window := http.local_flow_control_window(1)):
            size = min(window, http.max_outbound_frame_size, len(left))
            http.send_data(1, bytes(left[:size]))
            del left[:size]
        writer.write(http.data_to_send())
    http.reset_stream(1)
    writer.write(http.data_to_send())
    writer.close()
    return bytes(echoed)
