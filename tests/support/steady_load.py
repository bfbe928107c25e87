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
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW = 2**30
_HEAD_BYTES = 9


class BrokenError(Exception):
    """A request that got no complete answer."""


@dataclass
class Answer:
    """One response, complete once `ended` is set; `fault` says why there will be no more of it."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fault: str | None = None

    @property
    def status(self) -> int:
        """0 before the headers came."""
        return int(self.headers.get(":status", 0))

    def fail(self, fault: str) -> None:
        """There will be no more of it."""
        if not self.ended.is_set():
            self.fault = fault
            self.ended.set()


class _Connection:
    """One connection; `said_goodbye` once no new request may be sent on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = Encoder(), Decoder()
        self._answers: dict[int, Answer] = {}
        self._next = 1
        self.said_goodbye = False
        settings = SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: _WINDOW})
        window = WindowUpdateFrame(0, window_increment=_WINDOW)
        writer.write(_PREFACE + settings.serialize() + window.serialize())

    def send(self, path: str, body: bytes) -> Answer:
        """Begin a POST."""
        number, self._next = self._next, self._next + 2
        answer = self._answers[number] = Answer()
        headers = HeadersFrame(number, flags=["END_HEADERS"])
        headers.data = self._encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
            ]
        )
        data = DataFrame(number, data=body, flags=["END_STREAM"])
        self._writer.write(headers.serialize() + data.serialize())
        return answer

    async def read(self) -> None:
        """Take what comes until the server hangs up."""
        reason = "the connection was closed"
        try:
            while True:
                frame, length = Frame.parse_frame_header(
                    memoryview(await self._reader.readexactly(_HEAD_BYTES))
                )
                frame.parse_body(memoryview(await self._reader.readexactly(length)))
                self._take(frame)
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            reason = f"the connection broke: {error}"
        finally:
            self.said_goodbye = True
            for answer in self._answers.values():
                answer.fail(reason)
            self._writer.close()

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self._writer.write(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            pong = PingFrame(0, opaque_data=frame.opaque_data, flags=["ACK"])
            self._writer.write(pong.serialize())
        elif isinstance(frame, GoAwayFrame):
            self._goodbye(frame.last_stream_id)
        elif frame.stream_id in self._answers:
            self._take_of_stream(frame, self._answers[frame.stream_id])

    def _goodbye(self, last: int) -> None:
        self.said_goodbye = True
        for number in [number for number in self._answers if number > last]:
            self._answers.pop(number).fail("refused by a goodbye")
        self.hang_up_when_idle()

    def _take_of_stream(self, frame: Frame, answer: Answer) -> None:
        if isinstance(frame, HeadersFrame):
            answer.headers |= dict(self._decoder.decode(frame.data))
        elif isinstance(frame, DataFrame):
            answer.body += frame.data
        elif isinstance(frame, RstStreamFrame):
            answer.fail(f"reset with code {frame.error_code}")
        if "END_STREAM" in frame.flags:
            del self._answers[frame.stream_id]
            answer.ended.set()
            self.hang_up_when_idle()

    def hang_up_when_idle(self) -> None:
        """After a goodbye nothing keeps the connection but requests under way."""
        if self.said_goodbye and not self._answers:
            self._writer.close()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


class Http2Client:
    """Owns at most one connection that takes requests; opened when there is none."""

    def __init__(self, port: int, group: asyncio.TaskGroup) -> None:
        self._port, self._group = port, group
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def post(self, path: str, document: object) -> Answer:
        """A complete answer. Raises `BrokenError` and `OSError`."""
        async with self._opening:
            connection = self._connection
            if connection is None or connection.said_goodbye:
                streams = await asyncio.open_connection("127.0.0.1", self._port)
                connection = self._connection = _Connection(*streams)
                self._group.create_task(connection.read())
        answer = connection.send(path, json.dumps(document).encode())
        await answer.ended.wait()
        if answer.fault is not None:
            raise BrokenError(answer.fault)
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()


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
