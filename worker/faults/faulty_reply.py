"""Replies that are late, cut short, or nonsense; the means of `faults`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from worker.faults.settings import Faults

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

_JSON = b"application/json"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_CHUNK = b"# HELP vllm:padding What a page of this size is made of, and nothing else.\n" * 800
_GARBAGE_BYTES = 64 << 10


async def reply(
    send: Send, status: int, body: bytes, content_type: bytes = _JSON, headers: Headers = ()
) -> None:
    """Send a whole reply."""
    length = (b"content-length", b"%d" % len(body))
    head = [(b"content-type", content_type), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


class FaultyReply:
    """One reply on its way out: with more headers, and held up in the middle.

    After `after_events` parts of a stream (None: never) nothing leaves for `stall_seconds`. What
    comes meanwhile is kept, so that whoever writes does not notice and does not give the client up;
    it leaves when the time is over, whether more comes then or not. A context around one writer:
    leaving it waits for what is kept, or drops that when the writer failed.
    """

    def __init__(
        self, send: Send, headers: Headers, after_events: int | None, stall_seconds: float
    ) -> None:
        self._send = send
        self._headers = headers
        self._events_left = after_events
        self._stall_seconds = stall_seconds
        self._is_silent = False
        self._kept: list[Message] = []
        self._release: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FaultyReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._release is None:
            return
        if error is None:
            await self._release
        else:
            self._release.cancel()
            await asyncio.gather(self._release, return_exceptions=True)

    async def send(self, message: Message) -> None:
        """An ASGI `send`."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._headers]
        if self._is_silent:
            self._kept.append(message)
            return
        if self._release is not None:
            await self._release  # what was kept comes first
        await self._send(message)
        if message["type"] == "http.response.body" and message.get("more_body", False):
            self._part_sent()

    def _part_sent(self) -> None:
        if self._events_left is None:
            return
        self._events_left -= 1
        if self._events_left <= 0:
            self._events_left = None
            self._is_silent = True
            self._release = asyncio.create_task(self._let_go(), name="stalled-reply")

    async def _let_go(self) -> None:
        await asyncio.sleep(self._stall_seconds)
        self._is_silent = False
        for message in self._kept:
            await self._send(message)


async def bad_metrics(faults: Faults, app: Any, scope: Any, receive: Any, send: Send) -> None:
    """A `/metrics` page that a scraper must survive: `faults.metrics_page` says which."""
    page = faults.metrics_page
    if page == "garbage":
        await reply(send, 200, random.Random(0).randbytes(_GARBAGE_BYTES), _TEXT)
    elif page == "empty":
        await reply(send, 200, b"", _TEXT)
    elif page == "error":
        await reply(send, 500, b"Internal Server Error", _TEXT)
    elif page == "redirect":
        location = ((b"location", faults.metrics_redirect.encode("ascii")),)
        await reply(send, 302, b"", _TEXT, location)
    elif page == "huge":
        await _huge(send, receive, faults.metrics_bytes)
    else:
        await reply(send, 200, _half(await _captured(app, scope, receive)), _TEXT)


async def _huge(send: Send, receive: Any, num_bytes: int) -> None:
    """Chunks without end in sight, until the client has had enough."""
    head = [(b"content-type", _TEXT)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    async with asyncio.TaskGroup() as group:
        gone = group.create_task(_disconnected(receive), name="disconnect-watcher")
        while num_bytes > 0 and not gone.done():
            chunk = _CHUNK[:num_bytes]
            num_bytes -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        gone.cancel()
    await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _captured(app: Any, scope: Any, receive: Any) -> bytes:
    """The page that the application would have sent."""
    parts: list[bytes] = []

    async def keep(message: Message) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, keep)
    return b"".join(parts)


def _half(page: bytes) -> bytes:
    """Half a page, cut within a line."""
    return page[: len(page) // 2].rstrip(b"\n")
