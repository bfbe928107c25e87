"""One HTTP exchange as it is on the wire: over HTTP/1.1 or HTTP/2, with trailers both ways."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

Headers = Sequence[tuple[str, str]]
LIMIT_SECONDS = 120.0
READ_BYTES = 1024 * 1024


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    complete: bool = False


@dataclass(frozen=True)
class Ask:
    """Without `length`, HTTP/1.1 sends a chunk per piece; without an end, it stays open."""

    path: str
    pieces: Sequence[bytes] = ()
    method: str = "POST"
    headers: Headers = ()
    trailers: Headers = ()
    length: bool = True
    has_end: bool = True
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def framing(self) -> list[tuple[str, str]]:
        if not self.pieces and not self.trailers and self.method == "GET":
            return []
        if self.length and not self.trailers:
            return [("content-length", str(sum(map(len, self.pieces))))]
        return [("transfer-encoding", "chunked")]


async def exchange(port: int, ask: Ask, *, http2: bool = False) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await (_over_http2 if http2 else _over_http1)(reader, writer, ask)
    finally:
        writer.close()


async def _over_http1(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask
) -> Answer:
    http = h11.Connection(h11.CLIENT)
    headers = [("host", "a"), ("connection", "close"), *ask.headers, *ask.framing]
    request = h11.Request(method=ask.method, target=ask.path, headers=headers)

    async def send() -> None:
        writer.write(http.send(request) or b"")
        for piece in ask.pieces:
            writer.write(http.send(h11.Data(piece)) or b"")
            await writer.drain()
        if ask.has_end:
            writer.write(http.send(h11.EndOfMessage(headers=list(ask.trailers))) or b"")

    answer, body = Answer(), bytearray()
    sending = asyncio.ensure_future(send())
    try:
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {k.decode(): v.decode() for k, v in event.headers}
                ask.begun.set()
            elif isinstance(event, h11.Data):
                body += event.data
        answer.trailers = {k.decode(): v.decode() for k, v in event.headers}
        answer.complete = True
    except (h11.RemoteProtocolError, ConnectionError):
        pass  # it broke off
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    answer.body = bytes(body)
    return answer


async def _over_http2(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask
) -> Answer:
    stream = _Http2Stream(ask)
    while not stream.over:
        writer.write(stream.to_send())
        received = await reader.read(READ_BYTES)
        if not received:
            break
        stream.receive(received)
    return stream.answer


class _Http2Stream:
    def __init__(self, ask: Ask) -> None:
        self.answer = Answer()
        self.over = False
        self._ask = ask
        self._left = bytearray(b"".join(ask.pieces))
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._http.initiate_connection()
        framing = [pair for pair in ask.framing if pair[0] == "content-length"]
        headers = [
            *((":method", ask.method), (":scheme", "http"), (":authority", "a")),
            *((":path", ask.path), *ask.headers, *framing),
        ]
        self._ended = not self._left and not ask.trailers
        self._http.send_headers(1, headers, self._ended)

    def to_send(self) -> bytes:
        http = self._http
        while self._left and (window := http.local_flow_control_window(1)):
            size = min(window, http.max_outbound_frame_size)
            data = bytes(self._left[:size])
            del self._left[:size]
            self._ended = not self._left and not self._ask.trailers
            http.send_data(1, data, self._ended)
        if not self._left and not self._ended:
            http.send_headers(1, list(self._ask.trailers), end_stream=True)
            self._ended = True
        return http.data_to_send()

    def receive(self, data: bytes) -> None:
        answer = self.answer
        for event in self._http.receive_data(data):
            if isinstance(event, events.ResponseReceived):
                answer.headers = dict(event.headers)
                answer.status = int(answer.headers.pop(":status"))
                self._ask.begun.set()
            elif isinstance(event, events.DataReceived):
                answer.body += event.data
                self._http.acknowledge_received_data(event.flow_controlled_length, 1)
            elif isinstance(event, events.TrailersReceived):
                answer.trailers = dict(event.headers)
            elif isinstance(event, events.StreamEnded):
                answer.complete = self.over = True
            elif isinstance(event, events.StreamReset):
                self.over = True
