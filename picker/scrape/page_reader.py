"""One HTTP/1.1 response, parsed from bytes as they arrive, without I/O; the parser is llhttp.

An ambiguous response is an error, after which the connection cannot be reused. The head, the body
and the sum of all bytes have limits.
"""

import httptools

from picker.errors import PickerError

MAX_HEAD_BYTES = 16 * 1024  # servers send some hundred bytes
MAX_INTERIM_RESPONSES = 8  # servers send none
_SWITCHING_PROTOCOLS = 101


class ResponseError(PickerError):
    """The bytes are no usable HTTP response."""


class PageReader:
    """Collects one response; the parser calls the `on_…` methods."""

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
        self.redirects_to = ""  # the Location header, verbatim

    @property
    def begun(self) -> bool:
        return self._received > 0

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def body(self) -> bytes:
        """The part of the body that has arrived."""
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    @property
    def keep_alive(self) -> bool:
        """True if the connection may carry another request after this complete response."""
        return self._keep_alive and not self._surplus

    def feed(self, data: bytes) -> bool:
        """Parse `data`; return whether the response is complete. Raises `ResponseError`."""
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
        # Bounds chunks of one byte each, and endless trailers.
        if self._received > 2 * self._max_body_bytes + MAX_HEAD_BYTES:
            raise ResponseError(self._too_large())
        return False

    def end(self) -> None:
        if not self._head_done or self._has_length:
            raise ResponseError("the connection ended before the response did")
        self._complete = True

    # Called by the parser

    def on_message_begin(self) -> None:
        self._surplus = self._surplus or self._complete  # a second response is surplus

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header of the head, or a trailer."""
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
            self._refuse(
                "the body is compressed, although the request asked for an uncompressed one"
            )

    def on_headers_complete(self) -> None:
        self._head_done = not self._is_interim()

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        self._left -= len(data)
        if self._left < 0:
            self._refuse(self._too_large())
        self._chunks.append(data)

    def on_message_complete(self) -> None:
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
