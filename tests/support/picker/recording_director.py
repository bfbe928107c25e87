"""A director whose exchanges record what their streams do, and route on demand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from picker.errors import DropReason
from picker.types import FinishCause, RawRequest, RouteDecision

Routing = Callable[[RawRequest], Awaitable[RouteDecision]]


async def route_at_once(raw: RawRequest) -> RouteDecision:
    return RouteDecision("10.0.0.1:8000")


@dataclass
class RecordingExchange:
    routing: Routing
    evict: Callable[[DropReason], None] | None = None  # stops it while it is under way
    requests: list[RawRequest] = field(default_factory=list)
    cancelled: bool = False
    finished: asyncio.Future[tuple[FinishCause, int | None, str | None]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    finish_calls: int = 0

    def decides_at_once(self, raw: RawRequest) -> bool:
        return self.routing is route_at_once

    async def route(self, raw: RawRequest) -> RouteDecision:
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
    routing: Routing = route_at_once
    exchanges: list[RecordingExchange] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, evict: Callable[[DropReason], None] | None = None) -> RecordingExchange:
        exchange = RecordingExchange(self.routing, evict)
        self.exchanges.append(exchange)
        self.opened.set()
        return exchange


class HeldRouting:
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, raw: RawRequest) -> RouteDecision:
        self.started.set()
        await self.release.wait()
        return RouteDecision("10.0.0.1:8000")
