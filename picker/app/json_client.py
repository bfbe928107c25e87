"""Asks other servers on behalf of plugins: JSON over HTTP, with kept connections."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import aiohttp

from picker.framework.services import HttpError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
KEEPALIVE_SECONDS = 30.0


class JsonClient:
    """An `HttpClient`. Owns its connections; an async context manager, and useless outside."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> JsonClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a small answer could become a huge one
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
        """The decoded JSON of the answer; None for one without a body. Raises `HttpError`."""
        if self._session is None:
            raise HttpError(f"{url}: the picker is not running")
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.post(
                url, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await _read(response)
                if not 200 <= response.status <= 299:
                    raise HttpError(f"{url}: status {response.status}")
        except TimeoutError:
            raise HttpError(f"{url}: no answer within {timeout_seconds} s") from None
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise HttpError(f"{url}: {str(error) or type(error).__name__}") from error
        try:
            return json.loads(answer) if answer.strip() else None
        except (ValueError, RecursionError) as error:
            raise HttpError(f"{url}: the answer is no JSON: {error}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ValueError("the answer is compressed, which nobody asked for")
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)
