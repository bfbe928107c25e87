"""One HTTP exchange over ASGI: reading the request within limits, writing the reply.

Bare ASGI instead of a framework: a scrape every 50 ms and a write per token and stream leave no
room for more, and a dozen exact routes need none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from worker.errors import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class ClientGoneError(Exception):
    """The client closed its connection or stopped reading; there is nobody to answer."""


class Exchange:
    """One request and its reply. Owns whether the reply has begun.

    A write that a stalled client blocks for `write_stall_seconds` raises `ClientGoneError`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, write_stall_seconds: float
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = False
        self._headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._stall = write_stall_seconds
        self._extra: Headers = ()

    def header(self, name: bytes) -> str | None:
        """The first header of a (lower-case) name."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def add_header(self, name: bytes, value: str) -> None:
        """A header for the reply, whatever it will be. `value` is printable ASCII."""
        self._extra = (*self._extra, (name, value.encode("ascii")))

    def check_headers(self) -> None:
        """Refuse a request with absurdly many or long headers (431)."""
        headers = list(self._headers)
        size = sum(len(k) + len(v) for k, v in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise RequestError(
                f"More than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them",
                status=431,
                type="Request Header Fields Too Large",
            )

    async def json_body(self, max_bytes: int) -> bytes:
        """The whole body, which must be declared as JSON. Raises 413 as soon as it is too long."""
        content_type = self.header(b"content-type")
        if content_type is not None and "json" not in content_type.lower():
            raise RequestError(f"Content-Type must be application/json, got {content_type}")
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > max_bytes:
            raise self._too_long(max_bytes)
        chunks, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > max_bytes:
                raise self._too_long(max_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_long(self, max_bytes: int) -> RequestError:
        # What follows on this connection is the rest of the body, not a request.
        self.add_header(b"connection", "close")
        return RequestError(
            f"The body is longer than {max_bytes} bytes; see --max-body-bytes",
            status=413,
            type="Request Entity Too Large",
        )

    async def disconnected(self) -> None:
        """Wait until the client is gone, then raise `ClientGoneError`. The body must be read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGoneError

    async def reply(
        self, body: bytes = b"", status: int = HTTPStatus.OK, headers: Headers = (_JSON,)
    ) -> None:
        """Send a whole reply."""
        self.started = True
        length = (b"content-length", b"%d" % len(body))
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, length, *self._extra],
        }
        try:
            async with asyncio.timeout(self._stall):
                await self._send(start)
                await self._send({"type": "http.response.body", "body": body})
        except TimeoutError as error:
            raise ClientGoneError from error

    async def write_event(self, frames: bytes, *, last: bool) -> None:
        """Send frames of an event stream, with the headers before the first ones."""
        try:
            async with asyncio.timeout(self._stall):
                if not self.started:
                    self.started = True
                    headers = [*_EVENT_STREAM, *self._extra]
                    start = {"type": "http.response.start", "status": 200, "headers": headers}
                    await self._send(start)
                await self._send(
                    {"type": "http.response.body", "body": frames, "more_body": not last}
                )
        except TimeoutError as error:
            raise ClientGoneError from error
