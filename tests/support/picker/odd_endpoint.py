"""An endpoint that answers as its path says, over HTTP/1.1, and remembers what it was sent."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11

NUM_EVENTS = 10_000
EVENTS = [b'data: {"n":%d}\n\n' % n for n in range(NUM_EVENTS)]
CHUNKED = [("transfer-encoding", "chunked")]


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    body: bytes
    trailers: dict[str, str]


@dataclass
class OddEndpoint:
    host_port: str = ""
    port: int = 0
    got: list[Got] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError):
            while (request := await self._read(http, reader)) is not None:
                self.got.append(request)
                self.arrived.set()
                async for event in self._answer(request):
                    writer.write(http.send(event) or b"")
                    await writer.drain()
                if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                    break
                http.start_next_cycle()
        writer.close()

    async def _read(self, http: h11.Connection, reader: asyncio.StreamReader) -> Got | None:
        request, body = None, bytearray()
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                data = await reader.read(1024 * 1024)
                if not data:
                    return None
                http.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return None
        headers = {name.decode(): value.decode() for name, value in request.headers}
        trailers = {name.decode(): value.decode() for name, value in event.headers}
        return Got(request.target.decode(), headers, bytes(body), trailers)

    async def _answer(self, request: Got) -> AsyncIterator[h11.Event]:
        path = request.path.partition("?")[0]
        if path == "/hang":
            await self.go_on.wait()
        if path == "/events":
            kind = [("content-type", "text/event-stream"), *CHUNKED]
            yield h11.Response(status_code=200, headers=kind)
            for event in EVENTS:
                yield h11.Data(event)
            yield h11.EndOfMessage()
        elif path == "/half":
            yield h11.Response(status_code=200, headers=CHUNKED)
            yield h11.Data(b"half")
            await self.go_on.wait()
            yield h11.EndOfMessage()
        elif path == "/trailers":
            yield h11.Response(status_code=200, headers=CHUNKED)
            yield h11.Data(request.body)
            yield h11.EndOfMessage(headers=[("x-after", "all")])
        elif path.startswith("/v1/"):
            async for event in self._complete(request):
                yield event
        else:
            length = [("content-length", str(len(request.body)))]
            owned = [("x-llm-d-request-dropped-reason", "evicted"), ("x-kept", "yes")]
            yield h11.Response(status_code=200, headers=[*length, *owned])
            yield h11.Data(request.body)
            yield h11.EndOfMessage()

    async def _complete(self, request: Got) -> AsyncIterator[h11.Event]:
        asked = json.loads(request.body)
        text = json.dumps({"model": asked["model"], "usage": {"completion_tokens": 3}}).encode()
        if not asked.get("stream"):
            kind = [("content-type", "application/json"), ("content-length", str(len(text)))]
            yield h11.Response(status_code=200, headers=kind)
            yield h11.Data(text)
        else:
            kind = [("content-type", "text/event-stream"), *CHUNKED]
            yield h11.Response(status_code=200, headers=kind)
            stream = b"data: " + text + b"\n\n" + b"data: [DONE]\n\n"
            for at in range(0, len(stream), 7):
                yield h11.Data(stream[at : at + 7])
        yield h11.EndOfMessage()


@asynccontextmanager
async def odd_endpoint() -> AsyncIterator[OddEndpoint]:
    endpoint = OddEndpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    host, endpoint.port = server.sockets[0].getsockname()
    endpoint.host_port = f"{host}:{endpoint.port}"
    async with server:
        yield endpoint
        endpoint.go_on.set()
