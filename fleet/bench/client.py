"""Streamed requests over HTTP/1.1, at a few tens of microseconds of CPU each."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import httptools
import msgspec

from fleet.http_client import reason_in

Clock = Callable[[], float]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]
_MAX_REFUSAL_BYTES = 400
_EVENT_STREAM = b"text/event-stream"


# `gc=False`: there is one for each token, and the collector need not track them.
class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None

    @property
    def rest(self) -> str:
        text = self.reasoning_content or self.reasoning
        return text or ("" if self.tool_calls is None else str(self.tool_calls))


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_RETRY_DIGITS = 5  # more than a day; dates are not read
_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """The result of one request, in seconds of the client's clock.

    `intended` is when it should have been sent, and latencies count from then; `sent` is when the
    client began to connect or send. `gaps` are the times between chunks with tokens. `error` is
    empty for a complete answer; `text` is stored only for the next turn of a session.
    """

    intended: float
    sent: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    ended: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    status: int = 0
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: list[str] | None = None
    retry_after_seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.error

    @property
    def times(self) -> dict[str, float | None]:
        """The latencies by the names that objectives use; None for missing ones."""
        first, gaps = self.first_token, self.output_tokens - 1
        spread = None if first is None or gaps < 1 else (self.last_token - first) / gaps
        ttft = None if first is None else first - self.intended
        return {"ttft": ttft, "itl": spread, "e2e": self.ended - self.intended}


class Connection(asyncio.Protocol):
    """One persistent connection with at most one request on it."""

    def __init__(self, clock: Clock, free: list[Connection]) -> None:
        self._clock = clock
        self._free = free
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._outcome: Record | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._rest = b""
        self._pieces: list[bytes] = []
        self._is_stream = False
        self._is_whole = False
        self._has_answer = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, payload: bytes, outcome: Record) -> asyncio.Future[None]:
        """Write a request; the future completes with its answer, or with its failure as `error`."""
        self._done = asyncio.get_running_loop().create_future()
        self._outcome, self._rest, self._has_answer = outcome, b"", False
        self._is_stream = self._is_whole = False
        self._now = self._clock()
        if self._transport is None or self._transport.is_closing():
            self._finish("connection closed")
        else:
            self._transport.write(payload)
        return self._done

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_stale(self) -> bool:
        """Check if the server closed the connection before it answered the last request at all."""
        return not self._has_answer

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"no HTTP answer: {error}")
            self.abort()
        self._read()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(_EVENT_STREAM)
        elif name.lower() == b"retry-after" and value.isdigit() and self._outcome is not None:
            self._outcome.retry_after_seconds = float(value[:_RETRY_DIGITS])

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)  # called for each chunk of HTTP; parsing them together is cheaper

    def _read(self) -> None:
        outcome, data = self._outcome, self._rest + b"".join(self._pieces)
        self._pieces.clear()
        if outcome is None:
            return
        if not self._is_stream:
            self._rest = data[:_MAX_REFUSAL_BYTES]
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(outcome, line[5:])

    def _event(self, outcome: Record, data: bytes) -> None:
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if data.strip() == b"[DONE]":
                self._is_whole = True
            else:
                outcome.error = outcome.error or f"no chunk of the API: {error}"
            return
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.rest
            if text:
                now, last = self._now, outcome.last_token
                outcome.last_token = now
                if outcome.first_token is None:
                    outcome.first_token = now
                else:
                    outcome.gaps.append(now - last)
                if outcome.text is not None:
                    outcome.text.append(text)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
            outcome.cached_tokens = 0 if details is None else details.cached_tokens or 0
        if chunk.error is not None:
            outcome.error = outcome.error or f"error event: {reason_in(data)}"

    def on_message_complete(self) -> None:
        self._read()
        if self._outcome is None:
            return
        if self._parser.should_keep_alive():
            self._free.append(self)
        elif self._transport is not None:
            self._transport.close()
        self._complete(self._outcome)

    def _complete(self, outcome: Record) -> None:
        outcome.status = self._parser.get_status_code()
        error = outcome.error
        if outcome.status != 200:
            error = f"status {outcome.status}: {reason_in(self._rest)}"
        elif not self._is_stream:
            error = "the answer is no event stream"
        elif not error and not self._is_whole:
            error = "the stream ended before data: [DONE]"
        elif not error and outcome.first_token is None:
            error = "no token in the answer"
        if not outcome.output_tokens:  # without usage: one token a chunk
            outcome.output_tokens = len(outcome.gaps) + (outcome.first_token is not None)
        self._finish(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._free:
            self._free.remove(self)
        self._now = self._clock()
        if self._outcome is not None and self._is_whole and error is None:
            self._complete(self._outcome)  # an answer without a length ends with the connection
        self._finish(f"connection lost: {error}" if error else "connection closed")

    def _finish(self, error: str) -> None:
        outcome, done, self._outcome = self._outcome, self._done, None
        if outcome is not None and done is not None and not done.done():
            outcome.error, outcome.ended = error, self._now
            done.set_result(None)


class Client:
    """Owns the connections to one endpoint; `in_flight` requests have no answer yet."""

    def __init__(self, connect: Connect, head: bytes, clock: Clock, timeout_seconds: float) -> None:
        self._connect = connect
        self._head = head
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._free: list[Connection] = []
        self.in_flight = 0

    async def ask(self, body: bytes, outcome: Record) -> None:
        """Return once `outcome` is complete. If the server has closed a persistent connection in
        the meantime, another one replaces it, which is no failure.
        """
        payload = b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)
        self.in_flight += 1
        outcome.sent = self._clock()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while True:
                    was_free = bool(self._free)
                    connection = self._free.pop() if was_free else await self._another()
                    try:
                        await connection.send(payload, outcome)
                    except asyncio.CancelledError:
                        # Its answer may still come, so no other request can use the connection.
                        connection.abort()
                        raise
                    if not (outcome.error and was_free and connection.is_stale):
                        return
                    outcome.error = ""
        except TimeoutError:
            outcome.error, outcome.ended = "timeout", self._clock()
        except OSError as error:
            why = str(error) or type(error).__name__
            outcome.error, outcome.ended = f"no connection: {why}", self._clock()
        finally:
            self.in_flight -= 1

    async def _another(self) -> Connection:
        connection = Connection(self._clock, self._free)
        await self._connect(lambda: connection)
        return connection

    def close(self) -> None:
        """Close the free connections; the others end with their requests."""
        for connection in list(self._free):
            connection.abort()
