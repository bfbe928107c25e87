"""Any order of events releases the resources of an exchange exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.types import Candidate, FinishCause, InferenceRequest, RawRequest, ResponseHead, Usage
from tests.depth import examples

PATH = {":path": "/v1/completions"}
REQUESTS = (
    RawRequest({**PATH, "x-request-id": "id-1"}, b'{"model":"m","prompt":"p"}'),
    RawRequest({**PATH, "x-llm-d-model-name-rewrite": "n"}, b'{"model":"m","prompt":"p"}'),
    RawRequest(PATH, b"{"),
    RawRequest(PATH, b'{"model":"m","prompt":"p"}', subset_hint=("10.9.9.9",)),
    RawRequest(PATH, None),
    RawRequest({":path": "/v1/rerank"}, b"\xff"),
)


@dataclass
class Lease:
    rng: Random
    chance: float
    held: Counter[str] = field(default_factory=Counter)
    timeout_seconds: float = 0.4

    async def look_up(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Wait for a moment that a test may use to cancel."""
        await asyncio.sleep(0)
        self._fail()
        return request

    def pre_request(self, request: InferenceRequest, result: object, attributes: object) -> None:
        self.held[request.request_id] += 1
        self._fail()

    def response_head(self, flight: Flight, head: ResponseHead) -> None:
        self._fail()

    def response_progress(self, flight: Flight, progress: object) -> None:
        self._fail()

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        self.held[flight.request.request_id] -= 1
        self._fail()

    def _fail(self) -> None:
        if self.rng.random() < self.chance:
            raise self.rng.choice((ValueError("odd"), RefusedError(Code.FORBIDDEN, "no")))


@dataclass
class RandomGate:
    """Lets in, refuses or holds for a while; counts the tickets that are not closed."""

    rng: Random
    open_tickets: int = 0
    is_open: bool = False

    async def admit(self, request: InferenceRequest, evict: object) -> RandomGate:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.2:
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "full")
        self.open_tickets += 1
        return self

    queue_seconds = 0.5

    def left(self, endpoint_key: str) -> None: ...

    def pool_changed(self) -> None: ...

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        self.open_tickets -= 1


class Walk:
    def __init__(self, house: Any, rng: Random) -> None:
        self.house, self.rng = house, rng
        self.exchange = house.director.begin()
        self.routing: asyncio.Task[Any] | None = None
        self.is_finished = False

    def steps(self) -> list[Callable[[], None]]:
        if self.is_finished:
            return [self.finish]
        if self.routing is None:
            return [self.route, self.finish]
        if not self.routing.done():
            return [self.cancel]
        return [self.head, self.piece, self.piece, self.end, self.finish]

    def route(self) -> None:
        raw = self.rng.choice(REQUESTS)
        self.routing = asyncio.get_running_loop().create_task(self.exchange.route(raw))

    def cancel(self) -> None:
        if self.rng.random() < 0.3 and self.routing is not None:
            self.routing.cancel()
            if self.rng.random() < 0.3:
                self.finish()  # as when the proxy has answered the client itself

    def finish(self) -> None:
        self.is_finished = True
        self.exchange.finish(self.rng.choice(list(FinishCause)), self.rng.choice((None, 200, 500)))

    def head(self) -> None:
        content_type = self.rng.choice(("application/json", "text/event-stream", ""))
        if (tap := self.tap()) is not None:
            tap.head(ResponseHead(200, {"content-type": content_type}))

    def piece(self) -> None:
        if (tap := self.tap()) is not None:
            tap.body(self.rng.choice((b"", b'{"model":"n"', b"}")), self.rng.random() < 0.2)

    def end(self) -> None:
        if (tap := self.tap()) is not None:
            tap.end()

    def tap(self) -> Any:
        if self.routing is None or self.routing.cancelled() or self.routing.exception():
            return None
        return self.routing.result().response


@pytest.fixture(scope="module")
def quiet() -> Any:
    """Failures are what this test is made of."""
    log = logging.getLogger("picker.requestcontrol.plugin_log")
    log.disabled = True
    yield
    log.disabled = False


@examples(60)
@given(seed=st.integers(0, 2**32), chance=st.sampled_from((0.0, 0.1, 0.5)))
def test_counters_return_to_zero(quiet: Any, make_house: Any, seed: int, chance: float) -> None:
    asyncio.run(walk_many(make_house(), Random(seed), chance))


async def walk_many(house: Any, rng: Random, chance: float) -> None:
    lease, gate = Lease(rng, chance), RandomGate(rng)
    house.use(
        gate=gate,
        producers=[lease],
        hooks=[lease],
        response_heads=(lease,),
        response_progress=(lease,),
        request_ends=(lease,),
    )
    walks = [Walk(house, rng) for _ in range(10)]
    for _ in range(150):
        rng.choice(rng.choice(walks).steps())()
        await asyncio.sleep(0)
        house.inflight.check_integrity()
    for walk in walks:
        if walk.routing is not None:
            with contextlib.suppress(RefusedError, asyncio.CancelledError):
                await walk.routing
        walk.finish()
    assert house.inflight.total == 0
    assert set(lease.held.values()) <= {0}
    assert gate.open_tickets == 0
    assert len(house.recorder.outcomes) == len(walks)
