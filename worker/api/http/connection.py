"""One client connection: uvicorn's HTTP/1.1 protocol, with limits and stricter checks.

Uvicorn bounds neither the time nor the size of a request's head, does not notify pipelined requests
that the client left, answers a broken request in the middle of another answer, and closes on unread
data, which resets the connection, so that the answer may be lost. Here:

- A head has `header_timeout_seconds`, 100 headers and 64 KiB; the body's limits are the
  application's (`Exchange`).
- The parser is not lenient, and what it accepts but proxies read differently is refused: a transfer
  coding but `chunked`, HTTP/1.0 with one, and not exactly one `Host`. Trailers are dropped.
- An `Upgrade` is ignored (RFC 9110, section 7.8): Java's clients offer h2c with every request.
- HTTP/1.0 gets no chunks (RFC 9112, section 6.1): a stream ends with its connection.
- An error answer goes out only when no other answer is on its way; otherwise that one is finished
  and the connection closed.
- After an answer to a request that was not read to its end, the connection is half closed and what
  still arrives is discarded for `LINGER_SECONDS`.
- A client that half-closes after its requests (`nc -N`) gets the answers to those that only read.
  It looks like a client that left, so requests that cause work are aborted.
- If the application returns in the middle of an answer, the connection is cut without an error.
- A connection beyond `max_connections` is answered with 503 at once, so that file descriptors never
  run out and connections can still be accepted.
"""

import asyncio
import contextlib
import resource
from asyncio.events import TimerHandle
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from worker.api.http.exchange import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    error_body,
    headers_too_large,
    status_error,
)
from worker.config import ApiConfig
from worker.errors import RequestError

MAX_PIPELINED = 100
MAX_CONNECTIONS = 4096
LINGER_SECONDS = 2.0
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FURTHER_HEADERS = {
    int(HTTPStatus.SERVICE_UNAVAILABLE): "retry-after: 1\r\n",
    int(HTTPStatus.METHOD_NOT_ALLOWED): "allow: GET, POST, OPTIONS\r\n",  # RFC 9110, 15.5.6
}
# For the engine's socket, the model's files, pipes and whatever a library opens for a moment.
_RESERVED_FILES = 64


def protocol_of(config: ApiConfig, refused: Callable[[int], None]) -> type[asyncio.Protocol]:
    """Return the protocol; `refused` gets the status of every request refused before the app."""
    protocol = partial(
        GuardedProtocol,
        header_timeout_seconds=config.header_timeout_seconds,
        max_connections=allowed_connections(config.max_connections),
        refused=refused,
    )
    return cast("type[asyncio.Protocol]", protocol)


def allowed_connections(asked: int | None = None) -> int:
    """Return how many connections the file limit allows beside our own and a new engine's files."""
    most = MAX_CONNECTIONS if asked is None else asked
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, files - _RESERVED_FILES))


class _LingeringTransport:
    """A transport whose `close` lets the client read the last answer first."""

    def __init__(self, transport: asyncio.Transport, before_close: Callable[[], bool]) -> None:
        self._transport = transport
        self._before_close = before_close
        self._closing = False
        self.write = transport.write
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.abort = transport.abort

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._before_close():
                self._transport.close()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()


class GuardedProtocol(HttpToolsProtocol):
    """Owns the state of a connection: between requests, in a head, or in a body."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        header_timeout_seconds: float,
        max_connections: int,
        refused: Callable[[int], None],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = httptools.HttpRequestParser(self)  # without uvicorn's leniency
        self._header_timeout = header_timeout_seconds
        self._max_connections = max_connections
        self._count_refusal = refused
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._deaf = False  # nothing that comes is looked at any more
        self._half_closed = False
        self._refusal: RequestError | None = None
        self._running: RequestResponseCycle | None = None
        self._socket: asyncio.Transport | None = None

    # ---- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(cast(Any, _LingeringTransport(transport, self._linger)))
        if len(self.connections) > self._max_connections:
            self._deaf = True
            self._count_refusal(HTTPStatus.SERVICE_UNAVAILABLE)
            self._answer(status_error(HTTPStatus.SERVICE_UNAVAILABLE, "Too many open connections"))
            transport.close()
            return
        # Uvicorn starts it only behind an answer: a client that never asks would stay for ever.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every request of the connection, not just the last one."""
        self._stop_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data; return whether to stay open for short answers."""
        due = [cycle for cycle, _ in self.pipeline]
        if self._running is not None:
            due.append(self._running)
        if (self._deaf and not self._half_closed) or self._in_head or self._in_body:
            return False
        # Over TLS there is no half of a connection to keep.
        if not due or self.scheme == "https":
            return False
        self._half_closed = all(cycle.scope["method"] in _SAFE_METHODS for cycle in due)
        if self._half_closed:
            self._last_request()
        return self._half_closed

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        # The time counts from the first byte, however slowly the rest of the head comes.
        if not self._in_body and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._header_timeout, self._head_timed_out)
        was_in_head = self._in_head
        try:
            self._parse(data)
            if was_in_head and self._in_head:
                # The parser reports a header when it is complete: one without an end counts here.
                self._grow_head(len(data))
        except (httptools.HttpParserError, RequestError) as error:
            self._refuse(self._refusal or _malformed(str(error)))

    def _parse(self, data: bytes) -> None:
        """Parse the data; a body after an offer to upgrade goes to a second parser."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if self._in_body:
                    # Another parser reads it, behind a head that frames it and offers nothing.
                    lines = (b"%b: %b\r\n" % pair for pair in self._framing())
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")

    def _framing(self) -> list[tuple[bytes, bytes]]:
        names = (b"content-length", b"transfer-encoding")
        return [(k, v) for k, v in self.headers if k in names and v.strip() != b"0"]

    # ---- the parser's callbacks -------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._in_body:
            return  # of the head that `_parse` repeats
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(status_error(HTTPStatus.TOO_MANY_REQUESTS))
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow_head(len(name) + len(value))
        if not self._in_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise self._refused(headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check how the head frames the body, then start the application."""
        if self._in_body:
            return
        self._in_head = False
        self._stop_timer()
        self._check_framing()
        self._in_body = True
        self._head_bytes = 0
        try:
            super().on_headers_complete()
        except (httptools.HttpParserError, UnicodeDecodeError) as error:
            raise self._refused(_malformed("the request's target cannot be read")) from error

    def on_message_complete(self) -> None:
        """End the request, unless it offered an upgrade, whose body the parser only skips."""
        if self.parser.should_upgrade() and self._framing():
            return
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        if self._head_timer is not None:
            self._unset_keepalive_if_required()  # the next head has begun, and has its own timer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(self._run, cycle, app))

    async def _run(self, cycle: RequestResponseCycle, app: Any, *arguments: Any) -> None:
        scope, receive, send = arguments
        if scope["http_version"] == "1.0":
            send = partial(_send_without_chunks, cycle, send)
        await app(scope, receive, send)
        if cycle.response_complete or cycle.disconnected:
            return
        cycle.disconnected = True
        if self.flow.write_paused:
            self.transport.abort()  # the client does not read, so a close would wait for ever
        else:
            self.transport.close()

    def _grow_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEADER_BYTES:
            raise self._refused(headers_too_large())

    def _check_framing(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise self._refused(status_error(HTTPStatus.METHOD_NOT_ALLOWED, "This is no proxy"))
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._refused(status_error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED))
        codings = [v.strip().lower() for k, v in self.headers if k == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise self._refused(_malformed("the only Transfer-Encoding is chunked, in HTTP/1.1"))
        hosts = sum(k == b"host" for k, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise self._refused(_malformed("exactly one Host header is needed"))

    def _refused(self, error: RequestError) -> RequestError:
        """Keep and return the error, because the parser hides the exceptions of callbacks."""
        self._refusal = error
        return error

    def _refuse(self, error: RequestError) -> None:
        """End the connection with an error, unless another answer is due first."""
        self._deaf = True
        self._stop_timer()
        self._count_refusal(error.status)
        broken = self.cycle if self._in_body else None
        if broken is not None and broken is self._running and not broken.response_started:
            broken.disconnected = True  # no other part writes its answer
            broken.message_event.set()
        elif self._running is not None:
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()
            self._last_request()
            return
        self._answer(error)
        self.transport.close()

    def _last_request(self) -> None:
        self._deaf = True
        self._stop_timer()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is None:
            self.transport.close()
        else:
            last.keep_alive = False

    def _answer(self, error: RequestError) -> None:
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        head += _FURTHER_HEADERS.get(error.status, "")
        self.transport.write(head.encode() + b"\r\n" + body)

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if not self._deaf and not self.transport.is_closing():
            message = (
                f"The request's headers did not arrive within {self._header_timeout:g} seconds"
            )
            self._refuse(status_error(HTTPStatus.REQUEST_TIMEOUT, message))

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _linger(self) -> bool:
        """Prepare to close; return whether to discard data until the answer has been read."""
        if not (self._in_body or self._in_head or self._deaf) or self._socket is None:
            return False
        self._deaf = True
        self._stop_timer()
        transport = self._socket
        if transport.is_closing():
            return False
        # Reading may be paused, and unread data would make a reset of the close.
        self.flow.resume_reading()
        # TLS transports cannot half-close.
        with contextlib.suppress(OSError, NotImplementedError, RuntimeError):
            transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, transport.close)
        return True


async def _send_without_chunks(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Announce each piece as the rest of the body, so that uvicorn writes it without chunks."""
    if message["type"] == "http.response.start":
        if all(name != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
    elif cycle.expected_content_length == 0:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _malformed(reason: str) -> RequestError:
    return status_error(HTTPStatus.BAD_REQUEST, f"Invalid HTTP request: {reason}")
