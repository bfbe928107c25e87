"""Bytes of an API server as values: lists, lines of watches, refusals. Pure but for `read_bounded`.

What is no answer of an API server raises `UnreachableError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from picker.k8s.api import ApiError, UnreachableError, WatchEvent

MAX_BODY_BYTES: Final = 256 * 2**20
MAX_LINE_BYTES: Final = 16 * 2**20
_SHOWN_BYTES: Final = 200
_MESSAGE_LENGTH: Final = 1000  # of what a server says in refusals, which is logged


class ListMetadata(msgspec.Struct, frozen=True):
    """Where a list stands, and how it goes on."""

    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continue_: str = msgspec.field(name="continue", default="")


class Page(msgspec.Struct, frozen=True):
    """One page of a list; its objects are parts of the page's bytes."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None

    @property
    def objects(self) -> list[msgspec.Raw]:
        """The items; a server may say null for none."""
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


class Stream(Protocol):
    """A body that is still coming."""

    def iter_any(self) -> Any:
        """Its pieces as they come."""
        ...


async def read_bounded(stream: Stream, most_bytes: int) -> bytes:
    """A whole body. Raises `UnreachableError` when it is larger than `most_bytes`."""
    pieces: list[bytes] = []
    size = 0
    async for piece in stream.iter_any():
        size += len(piece)
        if size > most_bytes:
            raise UnreachableError(f"an answer of more than {most_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def decode_listing(body: bytes) -> Page:
    """A page of a list. What tells no version is none, though it may look like an empty one."""
    try:
        page = _PAGE.decode(body)
    except _NO_JSON as error:
        raise UnreachableError(f"the answer is no list: {error}: {_shown(body)}") from error
    if not page.metadata.resource_version:
        raise UnreachableError(f"the answer is no list: no resourceVersion: {_shown(body)}")
    return page


def decode_object(body: bytes) -> dict[str, Any]:
    """One object."""
    try:
        return _OBJECT.decode(body)
    except _NO_JSON as error:
        # Nothing of it is shown: reviews of tokens come back with the token in them.
        raise UnreachableError(f"the answer is no object: {error}") from error


def decode_event(line: bytes) -> WatchEvent:
    """A line of a watch. Raises `ApiError` for one that tells an error."""
    try:
        told = _LINE.decode(line)
    except _NO_JSON as error:
        raise UnreachableError(f"a line is no event: {error}: {_shown(line)}") from error
    if told.type == "ERROR":
        raise api_error(None, {}, bytes(told.object))
    return WatchEvent(told.type, told.object)


def api_error(status: int | None, headers: Mapping[str, str], body: bytes) -> ApiError:
    """A refusal, whatever its body is; without the `status` of HTTP that which the body tells."""
    try:
        told = _STATUS.decode(body)
    except _NO_JSON:
        return ApiError(status or 500, "", _shown(body).strip(), _retry_after(headers))
    seconds = told.details.retry_after_seconds if told.details else None
    if seconds is None:
        seconds = _retry_after(headers)
    code = status or told.code or 500
    message = (told.message or _shown(body))[:_MESSAGE_LENGTH]
    return ApiError(code, (told.reason or "")[:_SHOWN_BYTES], message, seconds)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; the form with a date is not one that API servers use."""
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


class WatchLines:
    """Cuts what comes on a watch into lines. A line may come in many pieces, which are put together
    once. Owns what has come of a line that has not ended.
    """

    def __init__(self, most_bytes: int = MAX_LINE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def added(self, piece: bytes) -> Iterator[bytes]:
        """The lines that have ended now, empty ones left out.

        Raises `UnreachableError` for one that does not end.
        """
        begun, *rest = piece.split(b"\n")
        self._size += len(begun)
        self._pieces.append(begun)
        for following in rest:
            line = b"".join(self._pieces)
            self._pieces, self._size = [following], len(following)
            if line.strip():
                yield line
        if self._size > self._most_bytes:
            raise UnreachableError(f"a line of more than {self._most_bytes} bytes")

    def check_whole(self) -> None:
        """Raises `UnreachableError` when the stream has ended within a line."""
        if b"".join(self._pieces).strip():
            raise UnreachableError("a watch ended in the middle of a line")


def _shown(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode(errors="replace")
