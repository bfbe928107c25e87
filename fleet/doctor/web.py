"""One page over HTTP, by TCP or a unix socket, with a limit on its time."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import h11
import msgspec

from fleet.envoy.probe import exchange
from fleet.envoy.settings import Address, PipeAddress, SocketAddress

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 128 * 2**20  # a dump of thousands of clusters has tens of megabytes
NO_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_PORTS = {"http": 80, "https": 443}


class NoPageError(Exception): ...


@dataclass(frozen=True, slots=True)
class WebPage:
    status: int
    content: bytes
    kind: str  # of the content, without parameters
    date: str | None

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace").strip()


class PageClient:
    """Asks `HOST:PORT`, a URL or `unix:///PATH`. A page has to arrive completely within the
    timeout. Certificates are not verified: a check of its own judges them.
    """

    def __init__(self, url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.url = url if "://" in url else f"http://{url}"
        self.url = self.url.rstrip("/")
        self._seconds = timeout_seconds

    async def page(self, path: str) -> WebPage:
        """Send a GET request and read the answer. Raises `NoPageError`."""
        try:
            address, base, host, tls = _place(self.url)
            headers = [("host", host), ("connection", "close")]
            asked = h11.Request(method="GET", target=base + path, headers=headers)
            async with asyncio.timeout(self._seconds):
                head, content = await exchange(address, asked, tls=tls, max_bytes=MAX_BYTES)
        except TimeoutError as error:
            raise NoPageError(f"no answer within {self._seconds:g} s") from error
        except (OSError, h11.ProtocolError, ValueError) as error:
            raise NoPageError(str(error) or type(error).__name__) from error
        fields = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        kind = fields.get("content-type", "").partition(";")[0].strip()
        return WebPage(head.status_code, content, kind, fields.get("date"))


def _place(url: str) -> tuple[Address, str, str, ssl.SSLContext | None]:
    """Return the address, path prefix, Host header and TLS context. Raises `ValueError`."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return PipeAddress(unquote(parts.path)), "", "localhost", None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("that is not an address: it takes http://HOST:PORT or unix:///PATH")
    tls = None
    if parts.scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    host = parts.netloc.rpartition("@")[2]
    port = parts.port or _PORTS[parts.scheme]
    return SocketAddress(parts.hostname, port), parts.path, host, tls
