"""An endpoint of the suite that speaks HTTP/2 without TLS (`kubernetes.io/h2c`), and nothing else.

It answers what the HTTP/1.1 endpoint answers, but for streams.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, WindowUpdated
from h2.exceptions import ProtocolError

from conformance.echo.answers import Received, Reply, reply_to


@dataclass(slots=True)
class _Asked:
    """One request, as far as it has come."""

    headers: list[tuple[str, str]]
    body: bytearray = field(default_factory=bytearray)


class H2cEchoServer:
    """One endpoint; `received` are the requests so far."""

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self.received: list[Received] = []
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def endpoint(self) -> str:
        """The address by which pickers name it."""
        return f"{self.address}:{self.port}"

    async def start(self) -> None:
        """Listen, unless it does. Raises OSError where the address cannot be had."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: _Connection(self), self.address, self.port
            )

    async def stop(self) -> None:
        """Refuse connections, and cut those there are."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for connection in list(self._connections):
                connection.cut()

    def answer(self, asked: _Asked) -> Reply:
        """Remember a request, and say what to answer."""
        named = dict(asked.headers)
        plain = tuple(pair for pair in asked.headers if not pair[0].startswith(":"))
        received = Received(
            self.endpoint, named[":method"], named[":path"], plain, bytes(asked.body), "h2c"
        )
        self.received.append(received)
        return reply_to(received)

    def opened(self, connection: _Connection) -> None:
        """A client has connected."""
        self._connections.add(connection)

    def closed(self, connection: _Connection) -> None:
        """A client is gone."""
        self._connections.discard(connection)


class _Connection(asyncio.Protocol):
    """One client. Bodies wait for its windows."""

    def __init__(self, server: H2cEchoServer) -> None:
        self._server = server
        self._http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._asked: dict[int, _Asked] = {}
        self._unsent: dict[int, bytes] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self._server.opened(self)
            self._http.initiate_connection()
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.closed(self)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for event in self._http.receive_data(data):
                self._take(event)
        except ProtocolError:
            self._flush()
            self.cut()
            return
        self._flush()

    def _take(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._asked[event.stream_id] = _Asked([(str(k), str(v)) for k, v in event.headers])
        elif isinstance(event, DataReceived):
            self._asked[event.stream_id].body += event.data
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self._answer(event.stream_id)
        elif isinstance(event, WindowUpdated):
            for stream_id in list(self._unsent):
                self._send(stream_id)

    def _answer(self, stream_id: int) -> None:
        reply = self._server.answer(self._asked.pop(stream_id))
        length = ("content-length", str(len(reply.body)))
        self._http.send_headers(stream_id, [(":status", "200"), *reply.headers, length])
        self._unsent[stream_id] = reply.body
        self._send(stream_id)

    def _send(self, stream_id: int) -> None:
        """Send the part of a body that fits the window."""
        body = self._unsent.pop(stream_id)
        while body:
            window = self._http.local_flow_control_window(stream_id)
            size = min(window, self._http.max_outbound_frame_size, len(body))
            if size == 0:
                self._unsent[stream_id] = body
                return
            self._http.send_data(stream_id, body[:size])
            body = body[size:]
        self._http.end_stream(stream_id)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(self._http.data_to_send())
