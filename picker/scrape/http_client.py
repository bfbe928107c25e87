"""The HTTP/1.1 client that fetches metrics pages: one idle connection per endpoint, GET only.

A general client costs three times as much CPU per page.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urljoin, urlsplit

from picker.errors import PickerError
from picker.scrape.page_reader import PageReader, ResponseError
from picker.scrape.sources import PageLocation, TlsFiles, is_request_path

TIMEOUT_SECONDS = 1.0  # that of the reference; a later page is old
_REDIRECTS = frozenset({301, 302, 307, 308})
_PORTS = {"http": 80, "https": 443}


class ScrapeError(PickerError):
    """A page that could not be fetched."""


class PageFetcher(Protocol):
    async def fetch(self, address: str) -> bytes:
        """Fetch the page at `address`, a `host:port`. Raises `ScrapeError`."""

    def forget(self, address: str) -> None:
        """Drop all state of an address that has left the pool."""


class HttpPages:
    """A `PageFetcher` for one `PageLocation`. Owns its connections; an async context manager."""

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

    async def __aexit__(self, *_: object) -> None:
        for address in tuple(self._idle):
            self.forget(address)

    async def fetch(self, address: str) -> bytes:
        """Fetch a page; follow one redirection on its server, and use that path until it fails."""
        request = self._requests.get(address) or self._prepare(address, self._path)
        deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        response = await self._response(address, request, deadline)
        if response.status in _REDIRECTS:
            path = _redirected(address, self._path, response)
            response = await self._response(address, self._prepare(address, path), deadline)
        if response.status != 200:
            # A remembered redirection may be out of date.
            self._requests.pop(address, None)
            raise ScrapeError(f"status {response.status}")
        return response.body

    async def _response(self, address: str, request: bytes, deadline: float) -> PageReader:
        connection = self._idle.pop(address, None)
        if connection is not None and connection.usable:
            try:
                return await self._ask(address, connection, request, deadline)
            except _LostError:
                pass  # the server had closed the idle connection; a new one may work
        try:
            connection = await self._connect(address, deadline)
            return await self._ask(address, connection, request, deadline)
        except _LostError as error:
            raise ScrapeError(str(error)) from None

    def forget(self, address: str) -> None:
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
        # A concurrent fetch had a connection of its own, and may have returned it.
        if response.keep_alive and connection.usable and address not in self._idle:
            self._idle[address] = connection
        else:
            connection.close()
        return response

    def _too_late(self) -> ScrapeError:
        return ScrapeError(f"no answer within {self._timeout_seconds} s")


def _redirected(address: str, path: str, response: PageReader) -> str:
    """Return the path that a redirection names. Raises `ScrapeError` for another server."""
    try:
        own = urlsplit(f"http://{address}{path}")
        target = urlsplit(urljoin(own.geturl(), response.redirects_to))
        port = target.port or _PORTS.get(target.scheme)
    except ValueError:
        target, port = own, None
    found = (target.path or "/") + (f"?{target.query}" if target.query else "")
    # A server behind a TLS proxy may name http for https, so the scheme of the source stays.
    if (target.hostname, port) != (own.hostname, own.port) or not is_request_path(found):
        raise ScrapeError(
            f"status {response.status} to {response.redirects_to[:200]!r}, which is not followed: "
            "set scheme, path and port of the data source"
        )
    return found


class _LostError(PickerError): ...


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight. Owns the reader of its response."""

    def __init__(self, max_page_bytes: int) -> None:
        self._max_page_bytes = max_page_bytes
        self._transport: asyncio.Transport | None = None
        self._reader: PageReader | None = None
        self._answer: asyncio.Future[PageReader] | None = None

    @property
    def usable(self) -> bool:
        transport = self._transport
        return transport is not None and self._answer is None and not transport.is_closing()

    async def ask(self, request: bytes, deadline: float) -> PageReader:
        """Send `request` and return the complete response; any error closes the connection."""
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
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own

    def data_received(self, data: bytes) -> None:
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
        """Return None, which closes the transport."""
        self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
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
    """Return the TLS context for pages over https; None for plain http. Raises `OSError`."""
    if location.scheme != "https":
        return None
    files: TlsFiles = location.tls
    context = ssl.create_default_context(cafile=files.ca_cert_path or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the default since Python 3.13
    if not files.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if files.client_cert_path:
        context.load_cert_chain(files.client_cert_path, files.client_key_path)
    return context
