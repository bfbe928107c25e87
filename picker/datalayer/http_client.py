"""Ask other servers on behalf of plugins: the `HttpClient` of `framework.services`, on aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from picker.framework.services import HttpError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_CONNECTIONS = 256
KEEP_ALIVE_SECONDS = 30.0
_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": "pointsman",
}


class AiohttpClient:
    """Keeps connections, follows no redirects, keeps no cookies, heeds no proxy of the environment.

    Owns the session; an async context manager. Plugins may be given it before it is entered, but it
    can only be asked after that.
    """

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AiohttpClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_SECONDS
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The decoded JSON of the answer, of 16 MiB at most; None for an answer without a body.

        Raises `HttpError` with the reason, and `TypeError` for a body that JSON cannot express.
        """
        if self._session is None:
            raise HttpError(f"{url} cannot be asked before the picker has started")
        content = msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.post(
                url,
                data=content,
                headers={**_HEADERS, **(headers or {})},
                allow_redirects=False,
                timeout=timeout,
            ) as response:
                answer = await _read(url, response)
        except TimeoutError:
            raise HttpError(f"{url}: no answer within {timeout_seconds} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HttpError(f"{url}: {str(error) or type(error).__name__}") from error
        return _decoded(url, answer)


async def _read(url: str, response: aiohttp.ClientResponse) -> bytes:
    if not 200 <= response.status < 300:
        raise HttpError(f"{url}: status {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(f"{url}: the answer is compressed, which nobody asked for")
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise HttpError(f"{url}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


def _decoded(url: str, answer: bytes) -> Any:
    if not answer:
        return None
    try:
        return msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(f"{url}: the answer is not valid JSON: {error}") from None
