"""One page over HTTP, by TCP or a unix socket, with a limit on how long it may take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 128 * 2**20
NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_UNIX = "unix"


class NoPageError(Exception):
    """Nobody answers, or not with HTTP, or it takes too long."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer, whatever its status."""

    status: int
    content: bytes
    kind: str  # of its content, without parameters
    date: str | None

    @property
    def text(self) -> str:
        """For people."""
        return self.content.decode(errors="replace").strip()


class HttpClient:
    """Asks one server. An asynchronous context manager that keeps the connection."""

    def __init__(self, url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`url`: http://HOST:PORT, HOST:PORT or unix:///PATH. A page has to be there to its last
        byte within the timeout. A certificate is not verified here: what it is worth is judged by a
        check of its own.
        """
        self.url = url if "://" in url else f"http://{url}"
        self.url = self.url.rstrip("/")
        self._problem, path = None, None
        try:
            split = urlsplit(self.url)
            path = unquote(split.path) if split.scheme == _UNIX else None
            _ = split.port  # looked at only here
        except ValueError as error:
            self._problem = f"that is no address: {error}"
        self._seconds = timeout_seconds
        self._base = self.url if path is None else "http://localhost"
        transport = httpx.AsyncHTTPTransport(verify=False, uds=path)
        self._http = httpx.AsyncClient(
            transport=transport, timeout=timeout_seconds, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def page(self, path: str) -> Page:
        """The answer to GET. Raises `NoPageError`."""
        if self._problem is not None:
            raise NoPageError(self._problem)
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._http.stream("GET", self._base + path) as answer,
            ):
                content = await _bounded(answer)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise NoPageError(f"no answer within {self._seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoPageError(str(error) or type(error).__name__) from error
        kind = answer.headers.get("content-type", "").partition(";")[0].strip()
        return Page(answer.status_code, content, kind, answer.headers.get("date"))


async def _bounded(answer: httpx.Response) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.aiter_bytes():
        size += len(piece)
        if size > MAX_BYTES:
            raise NoPageError(f"an answer of more than {MAX_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
