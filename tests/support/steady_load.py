"""Short and streamed requests without a pause, on connections that are kept, and what became of
each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import aiohttp
from http2_client import BrokenError, Http2Client

SHORT_TOKENS, STREAM_TOKENS = 4, 40
PICKED = "x-pointsman-endpoint"  # of `--decision-header`: this request has met a picker
PATH = "/v1/chat/completions"


def body(stream: bool, tokens: int) -> dict[str, object]:
    """A chat of exactly so many tokens."""
    return {
        "model": "sim",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        "messages": [{"role": "user", "content": "hello"}],
    }


@dataclass
class Load:
    """Counts of everything that was sent; `faults` by what went wrong, with how often."""

    served: Counter[str] = field(default_factory=Counter)  # by kind of client and answer
    faults: Counter[str] = field(default_factory=Counter)
    unpicked: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total(self) -> int:
        """Requests that were served."""
        return self.served.total()

    def judge(
        self, kind: str, stream: bool, status: int, headers: Mapping[str, str], text: bytes
    ) -> None:
        """Count one answer."""
        kind = f"{kind} {'stream' if stream else 'short'}"
        if status != 200:
            self.faults[f"{kind}: {status} {text[:200]!r}"] += 1
        elif not _is_complete(stream, text):
            self.faults[f"{kind}: incomplete: {text[-200:]!r}"] += 1
        else:
            self.served[kind] += 1
            self.unpicked += PICKED not in headers


def _is_complete(stream: bool, text: bytes) -> bool:
    if not stream:
        return json.loads(text)["usage"]["completion_tokens"] == SHORT_TOKENS
    return b'"completion_tokens":%d' % STREAM_TOKENS in text and text.endswith(b"data: [DONE]\n\n")


async def _over_http1(load: Load, port: int, stream: bool) -> None:
    """One client, one connection at a time."""
    url = f"http://127.0.0.1:{port}{PATH}"
    request = body(stream, STREAM_TOKENS if stream else SHORT_TOKENS)
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        while not load.stopped.is_set():
            try:
                async with session.post(url, json=request) as reply:
                    text = await reply.read()
                    load.judge("HTTP/1.1", stream, reply.status, reply.headers, text)
            except aiohttp.ClientError as error:
                load.faults[f"HTTP/1.1: {error!r}"] += 1
                await asyncio.sleep(0.01)


async def _over_http2(load: Load, client: Http2Client, stream: bool) -> None:
    """One of those that share a connection."""
    request = body(stream, STREAM_TOKENS if stream else SHORT_TOKENS)
    while not load.stopped.is_set():
        try:
            answer = await client.post(PATH, request)
            load.judge("HTTP/2", stream, answer.status, answer.headers, bytes(answer.body))
        except (BrokenError, OSError) as error:
            load.faults[f"HTTP/2: {error!r}"] += 1
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def steady_load(port: int) -> AsyncIterator[Load]:
    """Six clients at once for the length of the block; what they began they finish."""
    load = Load()
    async with asyncio.TaskGroup() as group:
        shared = Http2Client(port, group)
        async with asyncio.TaskGroup() as clients:
            for stream in (False, True):
                clients.create_task(_over_http1(load, port, stream))
                for _ in range(2):
                    clients.create_task(_over_http2(load, shared, stream))
            try:
                yield load
            finally:
                load.stopped.set()
        shared.close()
