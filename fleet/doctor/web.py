"""One page over HTTP, by TCP or a unix socket, with a limit on how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import httpx

TIMEOUT_SECONDS = 5.0
_UNIX = "unix://"


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


class Site:
    """Asks one server. An asynchronous context manager that keeps the connection."""

    def __init__(self, url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`url`: http://HOST:PORT, HOST:PORT or unix:///PATH. A certificate is not verified here:
        what it is worth is judged by a check of its own.
        """
        self.url = url if "://" in url else f"http://{url}"
        self.url = self.url.rstrip("/")
        path = unquote(urlsplit(self.url).path) if self.url.startswith(_UNIX) else None
        self._base = self.url if path is None else "http://localhost"
        transport = httpx.AsyncHTTPTransport(verify=False, uds=path)
        self._http = httpx.AsyncClient(
            transport=transport, timeout=timeout_seconds, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> Site:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def page(self, path: str) -> Page:
        """The answer to GET. Raises `NoPageError`."""
        try:
            answer = await self._http.get(self._base + path)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoPageError(str(error) or type(error).__name__) from error
        kind = answer.headers.get("content-type", "").partition(";")[0].strip()
        return Page(answer.status_code, answer.content, kind, answer.headers.get("date"))
