"""`pointsman front`: streams that outlive their workers, in front of a gateway.

When a stream is requested with the field `resume`, a worker of this project follows each write with
a comment that has the ids of the tokens written. The front passes bytes on up to such a comment and
holds the rest, so the client has the text of exactly the tokens that are known here. The last
write, with the finish reason, is passed on together with `[DONE]`. When a stream breaks before
that, the front sends the request again with those tokens, and another worker continues after them
(`worker.api.generate.resumption`). A stream is broken when its connection is, when it ends without
`[DONE]`, is silent for too long, or ends in an error event with the code 503.

Answers that are not streamed are held whole, and requested again when they break. Everything else
is passed on as it arrives. The front stores nothing beyond a request, so any number can run.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from base.forwarding import Headers, forwarded_headers, json_headers, new_session
from base.tracing import RequestTrace, Traced, call_of
from fleet.envoy.settings import LOCAL_REPLY_HEADER
from fleet.proxy.forward import (
    TRACE,
    begun,
    error_answer,
    pass_on,
    serve,
    tracing_of,
    unavailable,
    with_traces,
)
from picker.errors import DROP_REASON_HEADER
from worker.api.http.exchange import error_frame

logger = logging.getLogger(__name__)

TRACED = Traced("front", "pointsman-front", "front.request")
ATTEMPT_SPAN = "front.attempt"
MAX_HELD_BYTES = 8 << 20
STATE_HEADER = "x-pointsman-resume"
_MARKED = ("/v1/chat/completions", "/v1/completions")
_ASKED_AGAIN = (
    *_MARKED,
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/inference/v1/generate",
)
_DONE = b"data: [DONE]\n\n"
_MARK = b": resume "
_OK, _TOO_MANY, _CLIENT_CLOSED_REQUEST, _GONE = 200, 429, 499, 503
_NO_WORKER = (502, 503, 504)
_SIGNATURES = (LOCAL_REPLY_HEADER, DROP_REASON_HEADER)
_EVENT_STREAM = "text/event-stream"
_MAX_QUOTED_CHARACTERS = 200  # characters of a refusal that are quoted
# Envoy's text when a worker disconnects before it answers a request.
_LOST = b"connection termination"
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FrontOptions:
    host: str
    port: int
    gateway: str
    attempts: int
    patience: float
    stall_timeout: float
    drain_timeout: float
    tracing: bool = False


def front_command(given: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Raises `FleetError` when it cannot listen on the port."""
    return asyncio.run(_serve(FrontOptions(**vars(given))))


async def _serve(options: FrontOptions) -> int:
    async with tracing_of(options.tracing, TRACED) as tracing, new_session() as session:
        front = Front(options, session)
        address, handle = (options.host, options.port), with_traces(front.handle, tracing)
        await serve("front", handle, address, options.drain_timeout, front.drain)
    return 0


class _Asked(msgspec.Struct):
    stream: bool | None = None
    resume: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Front:
    """Knows whether it is draining: broken streams then end, because workers may be ending too."""

    def __init__(self, options: FrontOptions, session: aiohttp.ClientSession) -> None:
        self.options = options
        self.session = session
        self.is_draining = False

    def drain(self) -> None:
        self.is_draining = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = forwarded_headers(request.headers.items())
        url = f"{self.options.gateway.rstrip('/')}{request.rel_url}"
        if not _is_held(request):
            data = request.content if request.body_exists else None
            with call_of(request.get(TRACE), ATTEMPT_SPAN, headers, url=url) as within:
                return await pass_on(self.session, request, url, data, within)
        body = await request.read()
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.MsgspecError, RecursionError):
            asked = _Asked(resume=msgspec.Raw(b""))  # the worker reports the error
        streams = bool(asked.stream)
        # A client that sends the field follows the marks itself.
        is_marked = streams and request.path in _MARKED and asked.resume is msgspec.UNSET
        if is_marked:
            # Marks can only be read in an answer that is not compressed.
            headers = json_headers(headers)
        course = _Course(self, url, headers, _Client(request), body, marked=is_marked)
        return await course.run(request.get(TRACE))


def _is_held(request: web.Request) -> bool:
    length = request.content_length
    return (
        request.method == "POST"
        and request.path in _ASKED_AGAIN
        and "content-encoding" not in request.headers
        and length is not None
        and length <= MAX_HELD_BYTES
    )


class _BrokenError(Exception):
    """The answer is broken. With `is_refusal`, no worker has failed with the request."""

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


class _RefusedError(Exception):
    """A worker refuses to continue the answer, and so would any other."""


class _ClientGoneError(Exception): ...


class Marks:
    """Owns a stream's held bytes, and the tokens passed on: None until the first mark."""

    def __init__(self) -> None:
        self.held = bytearray()
        self.token_ids: list[int] | None = None
        self.is_complete = False

    def take(self, chunk: bytes) -> bytes:
        """Return what can be passed on: all up to the last mark. Raises `msgspec.MsgspecError`."""
        held = self.held
        held += chunk
        passed, tokens = bytearray(), None
        start = num_passed = 0
        while (end := held.find(b"\n\n", start) + 2) >= 2:
            is_mark, is_end = held.startswith(_MARK, start), held[start:end] == _DONE
            is_comment = held.startswith(b":", start) and start == num_passed
            if is_mark or is_end or is_comment:
                passed += held[num_passed : start if is_mark else end]
                num_passed = end
            if is_mark:
                new = msgspec.json.decode(held[start + len(_MARK) : end], type=list[int])
                tokens = (tokens or []) + new
            self.is_complete = self.is_complete or is_end
            start = end
        # After all marks are read, so that the bytes passed on and the known tokens agree.
        if tokens is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += tokens
        del held[:num_passed]
        return bytes(passed)

    def has_final_error(self) -> bool:
        last = bytes(self.held).rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
        try:
            event = msgspec.json.decode(last.removeprefix(b"data: "), type=_ErrorEvent)
        except msgspec.MsgspecError:
            return False
        return event.error.code != _GONE


class _ErrorDetail(msgspec.Struct):
    code: int


class _ErrorEvent(msgspec.Struct):
    error: _ErrorDetail


class _Client:
    """The receiver of the answer. Writing raises `_ClientGoneError`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def write(self, source: aiohttp.ClientResponse, text: bytes) -> None:
        response = self.response
        try:
            if response is None:
                response = self.response = await begun(self._request, source, STATE_HEADER)
            await response.write(text)
        except (aiohttp.ClientError, OSError) as error:
            raise _ClientGoneError from error

    async def end(self) -> None:
        assert self.response is not None  # noqa: S101 (the caller's promise)
        try:
            await self.response.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            raise _ClientGoneError from error

    def cut(self) -> None:
        """Close the connection, so that half an answer is not taken for a whole one."""
        if self._request.transport is not None:
            self._request.transport.close()


class _Course:
    """One request on its way from worker to worker. Owns its failures since the last token."""

    def __init__(
        self, front: Front, url: str, headers: Headers, client: _Client, body: bytes, marked: bool
    ) -> None:
        self._front = front
        self._options = front.options
        self._session = front.session
        self._url = url
        self._headers = headers
        self._client = client
        self._body = body
        self._marks = Marks() if marked else None
        self._state: Json = {}
        self._num_failures = self._num_lost = 0
        self._give_up_at = 0.0

    async def run(self, trace: RequestTrace | None) -> web.StreamResponse:
        num_tokens = 0
        while True:
            try:
                with call_of(trace, ATTEMPT_SPAN, self._headers, url=self._url) as within:
                    return await self._attempt(within)
            except _ClientGoneError:
                return self._client.response or web.Response(status=_CLIENT_CLOSED_REQUEST)
            except _RefusedError as error:
                return await self._give_up(str(error))
            except _BrokenError as error:
                reason = error
            # A stream may move as often as it gets further.
            if self._num_tokens > num_tokens:
                num_tokens, self._num_failures, self._num_lost = self._num_tokens, 0, 0
            if not self._may_try_again(reason):
                return await self._give_up(f"no worker answers: {reason}")
            if self._num_failures == 1:
                how = (
                    f"continues after {num_tokens} tokens"
                    if self._has_begun
                    else "is requested again"
                )
                logger.warning("%s: an answer %s: %s", self._url, how, reason)
            longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**self._num_failures)
            await asyncio.sleep(random.uniform(longest / 2, longest))

    @property
    def _has_begun(self) -> bool:
        return self._client.response is not None

    @property
    def _num_tokens(self) -> int:
        return 0 if self._marks is None else len(self._marks.token_ids or ())

    def _may_try_again(self, reason: _BrokenError) -> bool:
        now = asyncio.get_running_loop().time()
        if not self._num_failures:
            self._give_up_at = now + self._options.patience
        self._num_failures += 1
        # A refusal costs no worker anything, so only time bounds the number of those.
        self._num_lost += not reason.is_refusal
        # Without marks, an answer that has begun cannot be continued.
        if self._front.is_draining or (self._has_begun and not self._state):
            return False
        return self._num_lost < self._options.attempts and now < self._give_up_at

    async def _give_up(self, reason: str) -> web.StreamResponse:
        logger.error("%s: given up after %d tokens: %s", self._url, self._num_tokens, reason)
        response = self._client.response
        error = unavailable(reason)
        if response is None:
            return error_answer(error)
        if self._state:  # without marks it may have been cut within an event
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await response.write(error_frame(error))
        self._client.cut()
        return response

    async def _attempt(self, headers: Headers) -> web.StreamResponse:
        """Try once. Raises `_BrokenError`, `_RefusedError` and `_ClientGoneError`."""
        asking = self._session.post(self._url, data=self._asked(), headers=headers)
        try:
            async with self._limit():
                source = await asking
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                raise _BrokenError("the gateway does not answer", is_refusal=True) from error
            raise _BrokenError(str(error) or "silent") from error  # the request may have run
        async with source:
            await self._check(source)
            state = source.headers.get(STATE_HEADER)
            if self._marks is not None and state is not None:
                self._state = json.loads(state)
                await self._follow(source, self._marks)
            elif self._has_begun:
                raise _BrokenError("this worker cannot continue it", is_refusal=True)
            else:
                self._state = {}
                await self._take_whole(source)
        response = self._client.response
        assert response is not None  # noqa: S101 (all of it was written)
        return response

    def _asked(self) -> bytes:
        if self._marks is None:
            return self._body
        resume = self._state
        if self._marks.token_ids is not None:
            resume = {**resume, "token_ids": self._marks.token_ids}
        start = self._body.index(b"{") + 1
        # Put in front, so that the rest of the body stays as it came, byte for byte.
        return b'{"resume":' + msgspec.json.encode(resume) + b"," + self._body[start:]

    def _limit(self) -> asyncio.Timeout:
        # A prompt or a queue may take any time; only a stream that has begun can stall.
        return asyncio.timeout(self._options.stall_timeout if self._has_begun else None)

    async def _check(self, source: aiohttp.ClientResponse) -> None:
        """Raise unless this is the answer, or its continuation."""
        status, is_workers = source.status, source.content_type == "application/json"
        # A gateway without a worker writes no JSON, or Envoy or the picker has signed it.
        is_workers = is_workers and not any(name in source.headers for name in _SIGNATURES)
        if status == _OK or not (self._has_begun or (status in _NO_WORKER and not is_workers)):
            return
        try:
            async with self._limit():
                said = await source.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _BrokenError(str(error)) from error
        words = said.decode("utf-8", "replace")[:_MAX_QUOTED_CHARACTERS]
        if status in (*_NO_WORKER, _TOO_MANY):
            raise _BrokenError(f"{status} {words}", is_refusal=_LOST not in said)
        raise _RefusedError(f"the answer cannot continue: {status} {words}")

    async def _follow(self, source: aiohttp.ClientResponse, marks: Marks) -> None:
        # The next worker writes anew what had no mark.
        marks.held.clear()
        reason = "it ended early"
        try:
            while chunk := await self._next(source):
                passed = marks.take(chunk)
                if passed:
                    await self._client.write(source, passed)
                if marks.is_complete:
                    await self._client.end()
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        await self._next(source)  # its end: the connection can be reused
                    return
                if len(marks.held) > MAX_HELD_BYTES:
                    raise _RefusedError(f"more than {MAX_HELD_BYTES} bytes have no mark")
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            reason = str(error) or "silent"  # a TimeoutError is an OSError
        if not marks.has_final_error():
            raise _BrokenError(reason)
        await self._client.write(source, bytes(marks.held))
        self._client.cut()

    async def _next(self, source: aiohttp.ClientResponse) -> bytes:
        async with self._limit():
            return await source.content.readany()

    async def _take_whole(self, source: aiohttp.ClientResponse) -> None:
        """Pass on an answer that cannot be resumed; a small one is held until it is complete."""
        most = 0 if source.content_type == _EVENT_STREAM else MAX_HELD_BYTES
        held = bytearray()
        try:
            async for chunk in source.content.iter_any():
                held += chunk
                if len(held) > most:
                    await self._client.write(source, bytes(held))
                    held.clear()
        except (aiohttp.ClientError, OSError) as error:
            raise _BrokenError(str(error)) from error
        await self._client.write(source, bytes(held))
        await self._client.end()
