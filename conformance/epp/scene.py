"""A case's environment: a picker, its pool of echo servers, and an Envoy before both."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc

from conformance.case import Provision, Violation, expect
from conformance.echo.answers import SERVED_BY
from conformance.echo.pool import EchoPool
from conformance.gateway.envoy import Envoy
from conformance.pickers.picker import Picker
from conformance.waiting import until
from conformance.wire.health import health_of
from conformance.wire.messages import Answer, Request, Response, completion, take
from conformance.wire.stream import Stream, channel_to
from conformance.wire.tls_relay import tls_relay

BODILESS = Request(body=None, path="/v1/models")
READY_SECONDS = 60.0
OPEN, CLOSED, BY_HEADER = "fail-open", "fail-close", "by-header"


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply that a client of the gateway received."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def endpoint(self) -> str | None:
        """The endpoint that says it has served."""
        return self.headers.get(SERVED_BY)

    def described(self) -> dict[str, Any]:
        """The endpoint's description of the request. Raises `Violation` where there is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            raise Violation(f"status {self.status}, body {self.body[:200]!r}") from None
        return found if isinstance(found, dict) else {}

    def seen(self, header: str) -> list[str]:
        """The values of a request header as the endpoint saw them."""
        return [value for key, value in self.described().get("headers", []) if key == header]


@dataclass(slots=True)
class Scene:
    """The sole owner of the connections to the picker; cases leave everything as they found it.

    `envoy` is None where the target has no `Provision.GATEWAY`. An answer of the picker may take
    `patience_seconds`; starting, or following its pool, `ready_seconds`.
    """

    picker: Picker
    pool: EchoPool
    envoy: Envoy | None = None
    patience_seconds: float = 10.0
    ready_seconds: float = READY_SECONDS
    _connection: AsyncExitStack | None = None
    _channel: grpc.aio.Channel | None = None
    _connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    # Straight to the picker

    async def stream(self) -> Stream:
        """Open a new stream to the picker."""
        async with self._connecting:
            if self._channel is None:
                self._connection = AsyncExitStack()
                address = self.picker.address
                if self.picker.is_tls:
                    address = await self._connection.enter_async_context(tls_relay(address))
                self._channel = await self._connection.enter_async_context(channel_to(address))
        return Stream(self._channel, self.patience_seconds)

    async def ask(self, request: Request) -> Answer:
        """A request on a stream of its own, which then ends; all that was said to it."""
        stream = await self.stream()
        answer = await stream.request(request)
        await _add_rest(stream, answer)
        return answer

    async def routed(self, request: Request) -> Answer:
        """Like `ask`; raises `Violation` where the answer is no destination."""
        answer = await self.ask(request)
        if answer.status is not None or not answer.endpoints:
            raise Violation(f"no destination: {said(answer)}")
        return answer

    async def converse(self, request: Request, response: Response) -> tuple[Answer, Answer]:
        """A request and its response; raises `Violation` where the request is not routed."""
        stream = await self.stream()
        asked = await stream.request(request)
        expect(asked.endpoints, f"no destination: {said(asked)}")
        answered = await stream.response(response)
        await _add_rest(stream, answered)
        return asked, answered

    async def disconnect(self) -> None:
        """End the connections; the next stream makes new ones."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.aclose()

    # The picker itself

    async def until_ready(self) -> None:
        """Start the picker unless it runs, and wait until it routes requests."""
        await self.picker.start()

        async def routes() -> bool:
            if not self.picker.is_running:
                raise Violation("the picker has ended by itself")
            try:
                if (await self.ask(Request())).endpoints:
                    return True
            except (Violation, OSError):
                await self.disconnect()
            return False

        await until(routes, f"the picker at {self.picker.address} routes", self.ready_seconds)

    @asynccontextmanager
    async def pool_of(self, endpoints: Sequence[str]) -> AsyncIterator[None]:
        """Another pool, without any of the usual endpoints, for the length of the block."""
        usual = set(self.pool.endpoints)

        async def is_other() -> bool:
            named = (await self.ask(Request())).endpoints
            return bool(named) == bool(endpoints) and not usual & set(named)

        async def is_usual() -> bool:
            return bool(usual & set((await self.ask(Request())).endpoints))

        try:
            await self.picker.use_pool(endpoints)
            await until(is_other, "the picker follows its pool", self.ready_seconds)
            yield
        finally:
            await self.picker.use_pool(self.pool.endpoints)
            await until(is_usual, "the picker follows its pool", self.ready_seconds)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """Make the endpoints report an overload for the length of the block."""
        try:
            for server in self.pool.servers.values():
                server.is_full = True
            yield
        finally:
            for server in self.pool.servers.values():
                server.is_full = False

    async def health(self, service: str) -> str:
        """The state of a service by the picker's health port."""
        if self.picker.health_address is None:
            raise RuntimeError(f"the case does not say that it needs {Provision.HEALTH}")
        return await health_of(self.picker.health_address, service)

    # Through Envoy

    def gateway(self) -> Envoy:
        """The Envoy. Raises RuntimeError where there is none: the case has to say its need."""
        if self.envoy is None:
            raise RuntimeError(f"the case does not say that it needs {Provision.GATEWAY}")
        return self.envoy

    async def post(
        self,
        listener: str = CLOSED,
        path: str = "/v1/completions",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """A client's POST; a completion where no body is given."""
        sent = completion() if body is None else body
        named = {"content-type": "application/json", **(headers or {})}
        return await self._fetch("POST", listener, path, sent, named)

    async def get(
        self,
        listener: str = CLOSED,
        path: str = "/v1/models",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a GET to the gateway as a client."""
        return await self._fetch("GET", listener, path, None, headers or {})

    async def _fetch(
        self, method: str, listener: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        gateway = self.gateway()
        try:
            async with (
                asyncio.timeout(self.ready_seconds),
                gateway.client.request(
                    method, gateway.urls[listener] + path, data=body, headers=headers
                ) as response,
            ):
                got = {key.lower(): value for key, value in response.headers.items()}
                return Reply(response.status, got, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Violation(f"{method} {path}: {type(error).__name__} {error}") from error

    @asynccontextmanager
    async def without_picker(self) -> AsyncIterator[None]:
        """The picker is killed, and Envoy knows; after the block it is back and in use."""
        gateway = self.gateway()
        try:
            await self.picker.kill()
            await gateway.until_healthy(OPEN, 0)
            await gateway.until_healthy(CLOSED, 0)
            yield
        finally:
            await self.back_again()

    async def back_again(self) -> None:
        """Start the picker unless it runs; wait until it is ready and Envoy uses it."""
        await self.disconnect()
        await self.until_ready()
        if self.envoy is not None:
            for pool in (OPEN, CLOSED, BY_HEADER):
                await self.envoy.until_healthy(pool, 1)


async def _add_rest(stream: Stream, answer: Answer) -> None:
    """Messages that follow the last answer belong to it; how the stream ends is a case of its
    own.
    """
    with suppress(Violation):
        for message in await stream.rest():
            take(answer, message)


def said(answer: Answer) -> str:
    """An answer in words."""
    if answer.status is not None:
        return f"ImmediateResponse {answer.status} {answer.text[:200].decode(errors='replace')}"
    return f"{', '.join(answer.kinds) or 'nothing'}; destination {answer.endpoints or 'none'}"
