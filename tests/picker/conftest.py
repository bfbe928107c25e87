"""Fakes shared by the tests of the shells: an exchange that records and routes on demand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from picker.errors import DropReason
from picker.types import FinishCause, RawRequest, RouteDecision

Routing = Callable[[RawRequest], Awaitable[RouteDecision]]


@dataclass
class RecordingExchange:
    """Routes with `routing` and records its calls; more than one finish fails."""

    routing: Routing
    evict: Callable[[DropReason], None] | None = None  # stops it while it is under way
    requests: list[RawRequest] = field(default_factory=list)
    cancelled: bool = False
    finished: asyncio.Future[tuple[FinishCause, int | None, str | None]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    finish_calls: int = 0

    def decides_at_once(self, raw: RawRequest) -> bool:
        """Only what is known not to wait."""
        return self.routing is route_at_once

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Record the request and route it."""
        self.requests.append(raw)
        try:
            return await self.routing(raw)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        self.finish_calls += 1
        self.finished.set_result((cause, response_status, served_by))


@dataclass
class RecordingDirector:
    """Opens recording exchanges that all route with `routing`."""

    routing: Routing
    exchanges: list[RecordingExchange] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, evict: Callable[[DropReason], None] | None = None) -> RecordingExchange:
        exchange = RecordingExchange(self.routing, evict)
        self.exchanges.append(exchange)
        self.opened.set()
        return exchange


async def route_at_once(raw: RawRequest) -> RouteDecision:
    """Always the same endpoint."""
    return RouteDecision("10.0.0.1:8000")


class HeldRouting:
    """A routing that starts, says so, and waits until `release` is set."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, raw: RawRequest) -> RouteDecision:
        """Wait, then route."""
        self.started.set()
        await self.release.wait()
        return RouteDecision("10.0.0.1:8000")


@pytest.fixture
def director() -> Callable[..., RecordingDirector]:
    """Makes directors; without an argument they route at once."""

    def make(routing: Routing = route_at_once) -> RecordingDirector:
        return RecordingDirector(routing)

    return make


@pytest.fixture
def held_routing() -> Callable[[], HeldRouting]:
    """Makes routings that wait to be released."""
    return HeldRouting
