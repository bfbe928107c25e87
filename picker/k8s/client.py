"""`KubernetesApi` over HTTP with aiohttp; objects stay the received bytes.

A network path may keep sockets open and forward nothing, which no TCP keepalive detects. So every
watch asks the server to end it soon, and a watch without bytes for longer is dead
(docs/decisions/0028).
"""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Self, TypeAlias

import aiohttp
import msgspec

from base.http import reason
from picker.k8s.api import (
    ApiError,
    ApiResource,
    Listing,
    Selection,
    SilentError,
    UnreachableError,
    WatchEvent,
)
from picker.k8s.credentials import Access, Credentials

MAX_BODY_BYTES: Final = 256 * 2**20  # a list of 20,000 Pods
MAX_LINE_BYTES: Final = 16 * 2**20  # etcd stores 1.5 MiB
_SHOWN_BYTES: Final = 200
_MESSAGE_LENGTH: Final = 1000  # of a refusal's text, which is logged
_LIST_ATTEMPTS: Final = 3
_REFUSAL_BYTES: Final = 2**20
_REFUSAL_SECONDS: Final = 5.0
_EXPIRED: Final = 410
_UNAUTHORIZED: Final = 401
_OK: Final = range(200, 300)
_JSON: Final = "application/json"
_HTML: Final = "text/html"  # from a proxy before the server; else a watch would seem to open
_AGENT: Final = "pointsman-picker"
# As `socket.getaddrinfo` returns it.
_AddressInfo: TypeAlias = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, Any]


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of time (seconds) and of lists; a live server ends a watch before `silent_seconds`."""

    watch_seconds: tuple[int, int] = (18, 24)  # no change may go unseen for over half a minute
    silent_seconds: float = 28.0  # the server ends a quiet watch before
    connect_seconds: float = 5.0
    request_seconds: float = 15.0
    list_seconds: float = 30.0
    page_objects: int = 500
    max_pages: int = 2000


@dataclass(frozen=True, slots=True)
class _Question:
    method: str
    path: str
    query: Mapping[str, str] | None = None
    document: dict[str, Any] | None = None


class KubernetesClient:
    """A `KubernetesApi` over HTTP; a context manager that owns the connections."""

    def __init__(
        self, credentials: Credentials, *, rng: Random, limits: ClientLimits | None = None
    ) -> None:
        self._credentials = credentials
        self._rng = rng
        self._limits = limits or ClientLimits()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(socket_factory=_socket, limit=0)
        # Compression costs the server more than the bytes cost the network of a cluster.
        headers = {"Accept": _JSON, "Accept-Encoding": "identity", "User-Agent": _AGENT}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def list(self, resource: ApiResource, selection: Selection) -> Listing:
        """List all objects, in pages; start again if the list expires in between."""
        for _ in range(_LIST_ATTEMPTS - 1):
            try:
                return await self._pages(resource, selection)
            except ApiError as error:
                if error.status != _EXPIRED:
                    raise
        return await self._pages(resource, selection)

    async def _pages(self, resource: ApiResource, selection: Selection) -> Listing:
        items: list[msgspec.Raw] = []
        query = {"limit": str(self._limits.page_objects), **_selectors(selection)}
        path = resource.path(selection.namespace)
        for _ in range(self._limits.max_pages):
            body = await self._ask(_Question("GET", path, query), self._limits.list_seconds)
            page = decode_listing(body)
            items.extend(page.objects)
            if not page.metadata.continue_:
                return Listing(items, page.metadata.resource_version)
            query["continue"] = page.metadata.continue_
        raise UnreachableError(f"a list that does not end after {self._limits.max_pages} pages")

    @asynccontextmanager
    async def watch(
        self, resource: ApiResource, selection: Selection, resource_version: str
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._rng.randint(*self._limits.watch_seconds)),
            "resourceVersion": resource_version,
            **_selectors(selection),
        }
        timeout = self._timeout(sock_read=self._limits.silent_seconds)
        path = resource.path(selection.namespace)
        response = await self._open(_Question("GET", path, query), timeout)
        try:
            async with aclosing(_events(response, self._limits.silent_seconds)) as events:
                yield events
        finally:
            response.close()

    async def get(self, resource: ApiResource, namespace: str, name: str) -> dict[str, Any]:
        return decode_object(await self._ask(_Question("GET", resource.path(namespace, name))))

    async def send(self, method: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
        return decode_object(await self._ask(_Question(method, path, document=document)))

    async def has(self, resource: ApiResource) -> bool:
        path = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.version}"
        try:
            found = decode_object(await self._ask(_Question("GET", path)))
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        kinds = found.get("resources")
        listed = kinds if isinstance(kinds, list) else []
        return any(isinstance(one, dict) and one.get("name") == resource.plural for one in listed)

    async def _ask(self, question: _Question, seconds: float | None = None) -> bytes:
        timeout = self._timeout(total=seconds or self._limits.request_seconds)
        response = await self._open(question, timeout)
        with _translated():
            async with response:
                return await read_bounded(response.content, MAX_BODY_BYTES)

    async def _open(
        self,
        question: _Question,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - of aiohttp's kinds
    ) -> aiohttp.ClientResponse:
        """Return a successful, unread response; rejected credentials are renewed once."""
        access = await self._credentials.access()
        response = await self._send(access, question, timeout)
        if response.status == _UNAUTHORIZED:
            renewed = await self._credentials.renewed(access)
            if renewed is not access:
                response.close()
                response = await self._send(renewed, question, timeout)
        if response.status in _OK:
            if response.content_type != _HTML:
                return response
            response.close()
            raise UnreachableError("the answer is an HTML page (text/html), not that of an API")
        async with response:
            raise api_error(response.status, response.headers, await _beginning(response))

    async def _send(
        self,
        access: Access,
        question: _Question,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - of aiohttp's kinds
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise UnreachableError("the client is closed")
        headers = {} if access.authorization is None else {"Authorization": access.authorization}
        document = question.document
        if document is not None:
            headers["Content-Type"] = _JSON
        with _translated():
            # The limits of a watch apply to its socket, not to proxies and name servers.
            async with asyncio.timeout(timeout.total or timeout.sock_read):
                return await self._session.request(
                    question.method,
                    access.url + question.path,
                    params=question.query,
                    data=None if document is None else msgspec.json.encode(document),
                    headers=headers,
                    ssl=access.tls or True,
                    server_hostname=access.tls_server_name,
                    proxy=access.proxy,
                    timeout=timeout,
                    allow_redirects=False,
                )

    def _timeout(
        self, total: float | None = None, sock_read: float | None = None
    ) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=total, sock_connect=self._limits.connect_seconds, sock_read=sock_read
        )


def _selectors(selection: Selection) -> dict[str, str]:
    given = {"labelSelector": selection.label_selector, "fieldSelector": selection.field_selector}
    return {name: text for name, text in given.items() if text}


async def _events(
    response: aiohttp.ClientResponse, silent_seconds: float
) -> AsyncGenerator[WatchEvent, None]:
    """Yield the events of a watch; the event loop gets no turn between the lines of one piece."""
    loop, lines = asyncio.get_running_loop(), WatchLines()
    with _translated(SilentError):
        silent_at = loop.time() + silent_seconds
        while piece := await response.content.readany():
            for line in lines.added(piece):
                silent_at = loop.time() + silent_seconds
                yield decode_event(line)
            # Bytes without a line end are silence: a proxy may send blanks to keep it open.
            if loop.time() > silent_at:
                raise TimeoutError("no whole line")
        lines.check_whole()


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Read the beginning of a refusal; "" if it cannot be read, since the status suffices."""
    body = b""
    with suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(_REFUSAL_SECONDS):
            async for piece in response.content.iter_any():
                body += piece
                if len(body) >= _REFUSAL_BYTES:
                    break
    return body


@contextmanager
def _translated(silence: type[UnreachableError] = UnreachableError) -> Iterator[None]:
    try:
        yield
    except (aiohttp.SocketTimeoutError, TimeoutError) as error:
        raise silence("no answer in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnreachableError(reason(error)) from error


def _socket(address: _AddressInfo) -> socket.socket:
    """Return a socket that detects a dead peer within half a minute, even while idle."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
    return made


# Bytes of an API server → values. Bytes that are not its answer raise `UnreachableError`.


class ListMetadata(msgspec.Struct, frozen=True):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continue_: str = msgspec.field(name="continue", default="")


class Page(msgspec.Struct, frozen=True):
    """A page of a list; its objects are parts of the page's bytes."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None

    @property
    def objects(self) -> list[msgspec.Raw]:
        return self.items or []


class _Line(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    retry_after_seconds: float | None = None


class _Status(msgspec.Struct, frozen=True):
    kind: str | None = None
    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _Details | None = None


_NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_PAGE = msgspec.json.Decoder(Page)
_LINE = msgspec.json.Decoder(_Line)
_STATUS = msgspec.json.Decoder(_Status)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


async def read_bounded(stream: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """Read a whole body. Raises `UnreachableError` if it is larger than `max_bytes`."""
    pieces: list[bytes] = []
    size = 0
    async for piece in stream.iter_any():
        size += len(piece)
        if size > max_bytes:
            raise UnreachableError(f"an answer of more than {max_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def decode_listing(body: bytes) -> Page:
    """Decode a page of a list. A reply without a version is not a list, even if it looks empty."""
    try:
        page = _PAGE.decode(body)
    except _NO_JSON as error:
        raise UnreachableError(f"the answer is no list: {error}: {_shown(body)}") from error
    if not page.metadata.resource_version:
        raise UnreachableError(f"the answer is no list: no resourceVersion: {_shown(body)}")
    return page


def decode_object(body: bytes) -> dict[str, Any]:
    try:
        return _OBJECT.decode(body)
    except _NO_JSON as error:
        # Without the body: a review of a token contains the token.
        raise UnreachableError(f"the answer is no object: {error}") from error


def decode_event(line: bytes) -> WatchEvent:
    """Decode a line of a watch. Raises `ApiError` for an ERROR event."""
    try:
        event = _LINE.decode(line)
    except _NO_JSON as error:
        raise UnreachableError(f"a line is no event: {error}: {_shown(line)}") from error
    if event.type == "ERROR":
        raise api_error(None, {}, bytes(event.object))
    return WatchEvent(event.type, event.object)


def api_error(status: int | None, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Decode a refusal with any body; without an HTTP `status` the body's code counts."""
    try:
        refusal = _STATUS.decode(body)
    except _NO_JSON:
        return ApiError(status or 500, "", _shown(body).strip(), _retry_after(headers))
    seconds = refusal.details.retry_after_seconds if refusal.details else None
    if seconds is None:
        seconds = _retry_after(headers)
    code = status or refusal.code or 500
    message = (refusal.message or _shown(body))[:_MESSAGE_LENGTH]
    return ApiError(code, (refusal.reason or "")[:_SHOWN_BYTES], message, seconds)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


class WatchLines:
    """Splits the bytes of a watch into lines; the pieces of a long line are joined once."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def added(self, piece: bytes) -> Iterator[bytes]:
        """Yield the non-empty lines that `piece` completes; an endless one raises an error."""
        begun, *rest = piece.split(b"\n")
        self._size += len(begun)
        self._pieces.append(begun)
        for following in rest:
            line = b"".join(self._pieces)
            self._pieces, self._size = [following], len(following)
            if line.strip():
                yield line
        if self._size > self._max_bytes:
            raise UnreachableError(f"a line of more than {self._max_bytes} bytes")

    def check_whole(self) -> None:
        if b"".join(self._pieces).strip():
            raise UnreachableError("a watch ended in the middle of a line")


def _shown(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode(errors="replace")
