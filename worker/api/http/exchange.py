"""One HTTP exchange over ASGI: reading the request within limits, writing the reply.

This is plain ASGI: a scrape every 50 ms and a write per token and stream leave no time for a
framework, and a few dozen exact routes need none.
"""

import asyncio
import zlib
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from base.tracing import RequestTrace
from worker.api.http.limits import check_json
from worker.api.http.off_loop import off_loop_when_large
from worker.errors import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
MAX_QUERY_FIELDS = 32
# A body that no handler reads is discarded up to this size, so that the connection stays usable.
_MAX_DISCARDED_BYTES = 256 << 10
_DISCARD_SECONDS = 1.0

JSON = (b"content-type", b"application/json")
# Names of content codings, and the `wbits` with which zlib detects both of its formats.
_CODINGS = {"": 0, "identity": 0, "gzip": 47, "x-gzip": 47, "deflate": 47}
_EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class ClientGoneError(Exception):
    """The client closed its connection or stopped reading."""


class Exchange:
    """One request and its reply, whose errors have the form `errors`. `known_body` replaces a JSON
    body that has fields to ignore. A write that stalls for `write_stall_seconds` raises
    `ClientGoneError`.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        write_stall_seconds: float,
        body_timeout_seconds: float = 30.0,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id: str | None = None
        self.errors = OPENAI_ERRORS
        self.known_body: bytes | None = None
        self.trace: RequestTrace | None = None
        self.started = False
        self.status: int | None = None
        self.num_body_bytes = 0
        self.num_reply_bytes = 0
        self._query: bytes = scope.get("query_string", b"")
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._stall = write_stall_seconds
        self._body_timeout = body_timeout_seconds
        self._body_complete = False
        self._extra: Headers = ()

    # ---- the request ------------------------------------------------------------------------

    def header(self, name: bytes) -> str | None:
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")  # which takes any bytes
        return None

    def headers(self) -> list[tuple[str, str]]:
        """Return all headers; bytes that are not UTF-8 are escaped as `surrogateescape` does."""
        fields = (field for pair in self._headers for field in pair)
        texts = [field.decode("utf-8", "surrogateescape") for field in fields]
        return list(zip(texts[::2], texts[1::2], strict=True))

    def query(self) -> list[tuple[str, str]]:
        """Return the fields of the query string. Raises 400 if it cannot be read."""
        try:
            return parse_qsl(
                self._query.decode("ascii"),
                keep_blank_values=True,
                strict_parsing=bool(self._query),
                errors="strict",
                max_num_fields=MAX_QUERY_FIELDS,
            )
        except ValueError as error:
            raise RequestError(f"The query string cannot be read: {error}") from error

    def check_headers(self) -> None:
        size = sum(len(k) + len(v) for k, v in self._headers)
        if len(self._headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise headers_too_large()

    async def json_body(self, max_bytes: int) -> bytes:
        # The second run of a handler, without ignored fields.
        if self.known_body is not None:
            return self.known_body
        self._check_content_type()
        # JSON allows no byte order mark, but some clients write one.
        body = (await self.body(max_bytes)).removeprefix(BOM_UTF8)
        check_json(body)
        return body

    async def body(self, max_bytes: int) -> bytes:
        """Read and decode the body (RFC 9110, section 8.4). Raises 415, 413 or 408."""
        coding = (self.header(b"content-encoding") or "").strip().lower()
        if coding not in _CODINGS:
            # RFC 9110, section 15.5.16: name the codings that are supported.
            self.add_header(b"accept-encoding", "gzip, deflate")
            message = f"Content-Encoding {coding[:100]!a} is not supported: send gzip or deflate"
            raise status_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        try:
            async with asyncio.timeout(self._body_timeout):
                body = await self._read_body(max_bytes)
        except TimeoutError as error:
            message = f"The body did not arrive within {self._body_timeout:g} seconds"
            raise status_error(HTTPStatus.REQUEST_TIMEOUT, message) from error
        if not _CODINGS[coding]:
            return body
        return await off_loop_when_large(len(body), lambda: _decompressed(body, coding, max_bytes))

    def _check_content_type(self) -> None:
        given = self.header(b"content-type")
        # Clients that name no type mean JSON.
        if given is None:
            return
        media_type = given.partition(";")[0].strip().lower()
        if media_type != "application/json" and not (
            media_type.startswith("application/") and media_type.endswith("+json")
        ):
            message = f"Content-Type must be application/json, got {given[:100]!a}"
            raise status_error(HTTPStatus.BAD_REQUEST, message)

    async def _read_body(self, max_bytes: int) -> bytes:
        # An announced length is refused before it is read.
        if (self._declared_bytes or 0) > max_bytes:
            raise _too_long(max_bytes)
        chunks = []
        while not self._body_complete:
            chunks.append(await self._next_chunk())
            if self.num_body_bytes > max_bytes:
                raise _too_long(max_bytes)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _next_chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        self.num_body_bytes += len(chunk)
        return chunk

    @property
    def _declared_bytes(self) -> int | None:
        declared = self.header(b"content-length")
        if declared is not None and declared.isdecimal():
            return int(declared)
        return None if self.header(b"transfer-encoding") is not None else 0

    async def discard_body(self) -> None:
        """Read a short body that no handler needs; a long one ends the connection."""
        declared = self._declared_bytes
        if declared is None or not 0 < declared <= _MAX_DISCARDED_BYTES:
            return
        if self.header(b"expect") is not None:
            return  # the client has not sent it, and need not
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._body_complete:
                    await self._next_chunk()
        except TimeoutError:
            return

    async def disconnected(self) -> None:
        """Wait until the client is gone, then raise `ClientGoneError`. Read the body first."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGoneError

    # ---- the reply --------------------------------------------------------------------------

    def add_header(self, name: bytes, value: str) -> None:
        self._extra = (*self._extra, (name, value.encode("ascii")))

    async def reply(
        self, body: bytes = b"", status: int = HTTPStatus.OK, headers: Headers = (JSON,)
    ) -> None:
        await self._write(self._start(status, (*headers, (b"content-length", b"%d" % len(body)))))
        self.num_reply_bytes += len(body)
        await self._write({"type": "http.response.body", "body": body})

    async def write_event(self, frames: bytes, *, last: bool) -> None:
        if not self.started:
            await self._write(self._start(HTTPStatus.OK, _EVENT_STREAM))
        self.num_reply_bytes += len(frames)
        await self._write({"type": "http.response.body", "body": frames, "more_body": not last})

    def _start(self, status: int, headers: Headers) -> dict[str, Any]:
        self.started = True
        self.status = int(status)
        if not self._body_complete and self._declared_bytes != 0:
            # What follows on this connection is the rest of the body, not a request.
            self.add_header(b"connection", "close")
        return {
            "type": "http.response.start",
            "status": self.status,
            "headers": [*headers, *self._extra],
        }

    async def _write(self, message: dict[str, Any]) -> None:
        try:
            # While the client does not read, uvicorn waits here without a limit of its own.
            async with asyncio.timeout(self._stall):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGoneError from error


class ErrorDetail(msgspec.Struct):
    """The fault; `code` is the HTTP status, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: int


class Error(msgspec.Struct):
    """The envelope of OpenAI's API."""

    error: ErrorDetail


class Unauthorized(msgspec.Struct):
    """The body of a 401, as vLLM words it."""

    error: Literal["Unauthorized"] = "Unauthorized"


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The errors of an API: `body` makes one of type `kind`; `event` precedes it in a stream."""

    body: Callable[[RequestError], msgspec.Struct]
    kind: type[msgspec.Struct]
    unauthorized: msgspec.Struct
    event: bytes = b""


OPENAI_ERRORS = ErrorForm(
    lambda e: Error(ErrorDetail(e.message, e.type, e.param, e.status)), Error, Unauthorized()
)


def error_body(error: RequestError, form: ErrorForm = OPENAI_ERRORS) -> bytes:
    return msgspec.json.encode(form.body(error))


def error_frame(error: RequestError, form: ErrorForm = OPENAI_ERRORS) -> bytes:
    return form.event + b"data: " + error_body(error, form) + b"\n\n"


def status_error(status: HTTPStatus, message: str | None = None) -> RequestError:
    """Return an error of HTTP itself, whose type is the phrase of the status."""
    return RequestError(message or status.phrase, status=status.value, type=status.phrase)


def headers_too_large() -> RequestError:
    return status_error(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"More than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them",
    )


def _decompressed(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompress a body; refuse data after its end, as many thousand parts take quadratic time."""
    stream = zlib.decompressobj(_CODINGS[coding])
    try:
        # A byte beyond the limit suffices: a bomb is refused without being inflated.
        decoded = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(f"The body is not valid {coding}: {error}", param="body") from error
    if len(decoded) > max_bytes:
        raise _too_long(max_bytes)
    if stream.eof and not stream.unused_data:
        return decoded
    reason = "data follows its end" if stream.eof else "it ends too early"
    raise RequestError(f"The body is not valid {coding}: {reason}", param="body")


def _too_long(max_bytes: int) -> RequestError:
    return status_error(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is longer than {max_bytes} bytes; see --max-body-bytes",
    )
