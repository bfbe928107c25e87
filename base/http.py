"""An HTTP client off the hot path: whole bodies, bounded in time and in size.

Commands of few requests use `fleet.http_client`: importing aiohttp takes longer than they run.
"""

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

MAX_BODY_BYTES: Final = 16 * 2**20
CONNECT_SECONDS: Final = 5.0
KEEPALIVE_SECONDS: Final = 30.0
_REASONS: Final = (
    (aiohttp.InvalidURL, "the URL is not valid"),
    (aiohttp.ServerDisconnectedError, "the connection was closed without an answer"),
    (aiohttp.ClientPayloadError, "the answer broke off"),
)


class HttpError(Exception):
    """The server was not reached, broke off, took too long or sent too much."""


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response of any status. Names of headers are not case-sensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Owns its connections; an async context manager without redirects, proxies and cookies."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit: callers bound their own requests, and a queue here would add to their time-outs.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a small body could become a huge one
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
        json: Any = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> Response:
        """Return the response; the timeout covers everything. Raises `HttpError`."""
        if self._session is None:
            raise HttpError("the client is not running")
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(
                method,
                url,
                headers=headers,
                json=json,
                timeout=timeout,
                allow_redirects=False,  # a server may not choose what else is asked
            ) as response:
                body = await _read(response, max_bytes)
                return Response(response.status, response.headers, body)
        except TimeoutError as error:
            raise HttpError(f"no answer within {timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise HttpError(reason(error)) from error


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ValueError("the answer is compressed, although none was asked for")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
    return bytes(body)


def reason(error: BaseException) -> str:
    """Describe a failed exchange. aiohttp's own words may contain URLs with passwords."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{error.status} {error.message}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"no connection to {error.host}:{error.port}: {_cause(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection to {error.host}:{error.port}: {_cause(error.os_error)}"
    fixed = (text for kind, text in _REASONS if isinstance(error, kind))
    return next(fixed, None) or _cause(error)


def _cause(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS failed: {error.reason.replace('_', ' ').lower()}"
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or "the connection failed"
