"""One HTTP/1.1 response out of bytes as they arrive, without I/O; the parser is llhttp.

What could be understood in two ways is an error, after which the connection is of no use. Nothing a
server sends makes reading it cost more than its bytes: head, body and all bytes together are
capped.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, cast
from urllib.parse import urljoin, urlsplit

import httptools

from picker.errors import PickerError
from picker.scrape.sources import PageLocation, TlsFiles, is_request_path

MAX_HEAD_BYTES = 16 * 1024
MAX_INTERIM_RESPONSES = 8
_SWITCHING_PROTOCOLS = 101


class ResponseError(PickerError):
    """Bytes that are no response one can use."""


class PageReader:
    """Collects one response; its body has at most `max_body_bytes`.

    Only the parser calls the `on_…` methods.
    """

    __slots__ = (
        "_chunks",
        "_complete",
        "_has_length",
        "_head_bytes",
        "_head_done",
        "_interim",
        "_keep_alive",
        "_left",
        "_max_body_bytes",
        "_parser",
        "_received",
        "_refusal",
        "_surplus",
        "redirects_to",
    )

    def __init__(self, max_body_bytes: int) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._max_body_bytes = max_body_bytes
        self._chunks: list[bytes] = []
        self._left = max_body_bytes
        self._received = self._head_bytes = self._interim = 0
        self._head_done = self._complete = self._has_length = self._surplus = False
        self._keep_alive = False
        self._refusal: str | None = None
        self.redirects_to = ""  # as the response says it

    @property
    def begun(self) -> bool:
        """Whether any byte has arrived."""
        return self._received > 0

    @property
    def status(self) -> int:
        """Of a response whose head has arrived."""
        return int(self._parser.get_status_code())

    @property
    def body(self) -> bytes:
        """What has arrived of it."""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may be used for another request after this complete response."""
        return self._keep_alive and not self._surplus

    def feed(self, data: bytes) -> bool:
        """Take what arrived; True when the response is complete. Raises `ResponseError`.

        After bytes beyond the end the connection is not reused.
        """
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                raise ResponseError(self._refusal or f"no HTTP response: {error}") from None
            self._surplus = True
        if self._complete:
            return True
        if not self._head_done and self._received > MAX_HEAD_BYTES:
            raise ResponseError(f"the head is larger than {MAX_HEAD_BYTES} bytes")
        # Chunks of one byte each, or endless trailers.
        if self._received > 2 * self._max_body_bytes + MAX_HEAD_BYTES:
            raise ResponseError(self._too_large())
        return False

    def end(self) -> None:
        """The connection has ended. Raises `ResponseError` unless that ends the response."""
        if not self._head_done or self._has_length:
            raise ResponseError("the connection ended before the response did")
        self._complete = True

    # Called by the parser

    def on_message_begin(self) -> None:
        """A response begins; a second one is surplus."""
        self._surplus = self._surplus or self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the head, or a trailer."""
        if self._head_done:
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(f"the head is larger than {MAX_HEAD_BYTES} bytes")
        lower = name.lower()
        if lower == b"content-length":
            if int(value) > self._max_body_bytes:
                self._refuse(self._too_large())
            self._frame()
        elif lower == b"transfer-encoding":
            if value.lower() != b"chunked":
                self._refuse("its transfer encoding is not supported")
            self._frame()
        elif lower == b"location":
            self.redirects_to = value.decode("latin-1")
        elif lower == b"content-encoding" and value.lower() != b"identity":
            self._refuse("the body is compressed, although that was not asked for")

    def on_headers_complete(self) -> None:
        """The head is over; that of an interim response does not count."""
        self._head_done = not self._is_interim()

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        if self._complete:
            return
        self._left -= len(data)
        if self._left < 0:
            self._refuse(self._too_large())
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        """A response is over; the one that was asked for unless it was an interim one."""
        if not self._is_interim():
            if not self._complete:
                self._keep_alive = bool(self._parser.should_keep_alive())
            self._complete = True
            return
        self._interim += 1
        self._has_length = False
        if self.status == _SWITCHING_PROTOCOLS or self._interim > MAX_INTERIM_RESPONSES:
            self._refuse(f"unexpected status {self.status}")

    def _is_interim(self) -> bool:
        return self.status < 200

    def _frame(self) -> None:
        if self._has_length:
            self._refuse("it is not clear where the body ends")
        self._has_length = True

    def _too_large(self) -> str:
        return f"page is larger than {self._max_body_bytes} bytes"

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        raise ResponseError(reason)


TIMEOUT_SECONDS = 1.0
_REDIRECTS = frozenset({301, 302, 307, 308})
_PORTS = {"http": 80, "https": 443}


class ScrapeError(PickerError):
    """A page that could not be had."""


class PageFetcher(Protocol):
    """Fetches the pages of one source."""

    async def fetch(self, address: str) -> bytes:
        """The page at `address`, a `host:port`. Raises `ScrapeError`."""
        ...

    def forget(self, address: str) -> None:
        """The address will not be asked any more."""
        ...


class HttpPages:
    """A `PageFetcher` for one `PageLocation`. Owns its connections; an async context manager.

    An address is asked by one caller at a time; a second one gets a connection of its own.
    """

    def __init__(
        self,
        location: PageLocation,
        ssl_context: ssl.SSLContext | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._path = location.path
        self._max_page_bytes = location.max_page_bytes
        self._ssl = ssl_context
        self._timeout_seconds = timeout_seconds
        self._idle: dict[str, _Connection] = {}
        self._requests: dict[str, bytes] = {}

    async def __aenter__(self) -> HttpPages:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for address in tuple(self._idle):
            self.forget(address)

    async def fetch(self, address: str) -> bytes:
        """The page at `address`, a `host:port`. Raises `ScrapeError`.

        One redirection to another path of the same server is followed, and remembered until that
        path fails.
        """
        request = self._requests.get(address) or self._prepare(address, self._path)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        response = await self._response(address, request, deadline)
        if response.status in _REDIRECTS:
            path = _redirected(address, self._path, response)
            response = await self._response(address, self._prepare(address, path), deadline)
        if response.status != 200:
            self._requests.pop(address, None)
            raise ScrapeError(f"status {response.status}")
        return response.body

    async def _response(self, address: str, request: bytes, deadline: float) -> PageReader:
        connection = self._idle.pop(address, None)
        if connection is not None and connection.usable:
            try:
                return await self._ask(address, connection, request, deadline)
            except _LostError:
                pass  # the server had closed it already, which says nothing about the next one
        try:
            connection = await self._connect(address, deadline)
            return await self._ask(address, connection, request, deadline)
        except _LostError as error:
            raise ScrapeError(str(error)) from None

    def forget(self, address: str) -> None:
        """Close the idle connection to `address`."""
        self._requests.pop(address, None)
        connection = self._idle.pop(address, None)
        if connection is not None:
            connection.close()

    def _prepare(self, address: str, path: str) -> bytes:
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: {address}",
            "User-Agent: pointsman",
            "Accept: */*",
            "Accept-Encoding: identity",
        )
        self._requests[address] = "\r\n".join((*lines, "", "")).encode()
        return self._requests[address]

    async def _connect(self, address: str, deadline: float) -> _Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._max_page_bytes),
                    host.removeprefix("[").removesuffix("]"),
                    int(port),
                    ssl=self._ssl,
                )
        except TimeoutError:
            raise self._too_late() from None
        except (OSError, ValueError, OverflowError) as error:  # SSLError and gaierror are OSErrors
            raise ScrapeError(str(error) or type(error).__name__) from error
        return connection

    async def _ask(
        self, address: str, connection: _Connection, request: bytes, deadline: float
    ) -> PageReader:
        try:
            response = await connection.ask(request, deadline)
        except TimeoutError:
            raise self._too_late() from None
        except ResponseError as error:
            raise ScrapeError(str(error)) from error
        if response.keep_alive and connection.usable and address not in self._idle:
            self._idle[address] = connection
        else:
            connection.close()
        return response

    def _too_late(self) -> ScrapeError:
        return ScrapeError(f"no answer within {self._timeout_seconds} s")


def _redirected(address: str, path: str, response: PageReader) -> str:
    """The path that a redirection names. Raises `ScrapeError` unless it is of the same server."""
    try:
        own = urlsplit(f"http://{address}{path}")
        target = urlsplit(urljoin(own.geturl(), response.redirects_to))
        port = target.port or _PORTS.get(target.scheme)
    except ValueError:
        target, port = own, None
    found = (target.path or "/") + (f"?{target.query}" if target.query else "")
    # A server behind a TLS proxy may name http for https: the scheme stays that of the source.
    if (target.hostname, port) != (own.hostname, own.port) or not is_request_path(found):
        raise ScrapeError(
            f"status {response.status} to {response.redirects_to[:200]!r}, which is not followed: "
            "set scheme, path and port of the data source"
        )
    return found


class _LostError(PickerError):
    """The connection ended before a single byte of the answer."""


class _Connection(asyncio.Protocol):
    """A connection that carries one request at a time. Owns the reader of its response."""

    def __init__(self, max_page_bytes: int) -> None:
        self._max_page_bytes = max_page_bytes
        self._transport: asyncio.Transport | None = None
        self._reader: PageReader | None = None
        self._answer: asyncio.Future[PageReader] | None = None

    @property
    def usable(self) -> bool:
        """Whether a request may be sent."""
        transport = self._transport
        return transport is not None and self._answer is None and not transport.is_closing()

    async def ask(self, request: bytes, deadline: float) -> PageReader:
        """The complete response. Raises `TimeoutError`, `ResponseError` and `_LostError`.

        Unless it returns, the connection is closed.
        """
        if self._transport is None:
            raise _LostError("the connection is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[PageReader] = loop.create_future()
        self._answer, self._reader = answer, PageReader(self._max_page_bytes)
        timer = loop.call_at(deadline, self._fail, TimeoutError)
        self._transport.write(request)
        try:
            response = await answer
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
            self._answer = self._reader = None
        return response

    def close(self) -> None:
        """Close at once, without waiting for what is to be sent."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands. (uvloop's transports are not of asyncio's class.)"""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """A part of the answer, or unsolicited bytes."""
        reader = self._reader
        if reader is None or self._answer is None or self._answer.done():
            self.close()
            return
        try:
            if reader.feed(data):
                self._answer.set_result(reader)
        except ResponseError as error:
            self._answer.set_exception(error)

    def eof_received(self) -> None:
        """The server sends no more; the transport closes itself."""
        self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        if exc is None:
            self._ended()
        else:
            self._fail(lambda: self._lost(str(exc) or type(exc).__name__))

    def _ended(self) -> None:
        reader, answer = self._reader, self._answer
        if reader is None or answer is None or answer.done():
            return
        if not reader.begun:
            answer.set_exception(_LostError("the connection was closed without an answer"))
            return
        try:
            reader.end()
        except ResponseError as error:
            answer.set_exception(error)
        else:
            answer.set_result(reader)

    def _lost(self, reason: str) -> PickerError:
        begun = self._reader is not None and self._reader.begun
        return ResponseError(reason) if begun else _LostError(reason)

    def _fail(self, error: Callable[[], BaseException]) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error())


def tls_context(location: PageLocation) -> ssl.SSLContext | None:
    """How pages over https check certificates; None for plain http. Raises `OSError`."""
    if location.scheme != "https":
        return None
    files: TlsFiles = location.tls
    context = ssl.create_default_context(cafile=files.ca_cert_path or None)
    if not files.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if files.client_cert_path:
        context.load_cert_chain(files.client_cert_path, files.client_key_path)
    return context
