"""Requests that wait at a gate, their memory, and the release of what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.errors import Code, DropReason, RefusedError
from picker.framework.interfaces import Flight
from picker.requestcontrol.bodies import REQUEST_BYTES, held_bytes
from picker.requestcontrol.director import Exchange
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    MultiModalFeature,
    ParsedBody,
    RawRequest,
    ResponseHead,
    Usage,
)
from tests.depth import examples
from tests.support.picker.held_gate import HeldGate, Pass

PATH = {":path": "/v1/completions", "x-request-id": "id-1"}
BODY = b'{"model":"m","prompt":"p"}'
ASKED = RawRequest({**PATH, "x-llm-d-inference-fairness-id": "tenant"}, BODY)
BODYLESS = RawRequest(PATH, None)
GONE = RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.SATURATED, 3)


@pytest.fixture
def gate() -> HeldGate:
    return HeldGate()


@asynccontextmanager
async def held(
    house: Any, gate: HeldGate, raw: RawRequest = ASKED, **plugins: Any
) -> AsyncIterator[Any]:
    house.use(gate=gate, **plugins)
    exchange = house.director.begin()
    routing = asyncio.create_task(exchange.route(raw))
    await gate.came.wait()
    try:
        yield exchange, routing
    finally:
        routing.cancel()
        with suppress(asyncio.CancelledError, RefusedError):
            await routing


async def test_a_request_goes_once_it_is_let_in(house: Any, gate: HeldGate) -> None:
    async with held(house, gate) as (exchange, routing):
        assert house.scheduler.calls == []
        assert house.inflight.total == 0
        gate.let_in("id-1", queue_seconds=2.5)
        await routing
        (issued,) = gate.passes
        counted: list[int] = []
        issued.on_closed = lambda: counted.append(house.inflight.total)
        assert (issued.places, issued.ends) == (["default/pod-1"], [])
        exchange.finish(FinishCause.COMPLETED, 200)
        exchange.finish(FinishCause.RESET)
    assert (issued.places, issued.ends) == (["default/pod-1"], [FinishCause.COMPLETED])
    assert counted == [0]
    (decision,), (outcome,) = house.recorder.decisions, house.recorder.outcomes
    assert (decision.queue_seconds, outcome.queue_seconds) == (2.5, 2.5)


async def test_it_sees_the_pool_as_it_is_after_the_wait(house: Any, gate: HeldGate) -> None:
    late = [Candidate(Endpoint(f"late-{n}", f"10.0.9.{n}", 8000)) for n in (1, 2, 3)]
    raw = RawRequest(PATH, BODY, subset_hint=("10.0.0.1", "10.0.9.2:8000", "10.0.9.3"))
    async with held(house, gate, raw) as (_, routing):
        house.pool_of(*late)
        house.inflight.acquire("default/late-3")
        gate.let_in("id-1")
        await routing
    ((_, candidates, _),) = house.scheduler.calls
    assert [(one.key, one.inflight_requests) for one in candidates] == [
        ("default/late-2", 0),
        ("default/late-3", 1),
    ]


async def test_a_pool_that_emptied_during_the_wait_is_a_503(house: Any, gate: HeldGate) -> None:
    async with held(house, gate) as (exchange, routing):
        house.pool_of()
        gate.let_in("id-1")
        with pytest.raises(RefusedError) as refused:
            await routing
        exchange.finish(FinishCause.REFUSED, 503)
    assert (refused.value.status, refused.value.drop_reason) == (503, DropReason.NO_ENDPOINTS)
    assert (gate.passes[0].places, gate.passes[0].ends) == ([], [FinishCause.REFUSED])


async def test_a_refusal_of_the_gate_is_the_answer(house: Any, gate: HeldGate) -> None:
    async with held(house, gate) as (exchange, routing):
        gate.refuse("id-1", GONE)
        with pytest.raises(RefusedError) as refused:
            await routing
        exchange.finish(FinishCause.REFUSED, 429)
    assert refused.value is GONE
    (outcome,) = house.recorder.outcomes
    assert (outcome.refusal, outcome.fairness_id, outcome.endpoint_key) == (GONE, "tenant", None)
    assert outcome.queue_seconds > 0
    assert outcome.request is not None
    assert gate.passes == []


async def test_a_request_without_a_body_passes_the_gate_by(house: Any, gate: HeldGate) -> None:
    """The cost of a request without a body is unknown."""
    house.use(gate=gate)
    exchange, decision = await house.route(BODYLESS)
    assert decision.destination
    exchange.finish(FinishCause.COMPLETED, 200)
    assert gate.passes == []
    assert house.recorder.outcomes[0].queue_seconds == 0.0


async def test_the_gate_is_notified_of_requests_that_end_without_a_ticket(
    house: Any, gate: HeldGate
) -> None:
    freed: list[int] = []
    gate.on_pool_changed = lambda: freed.append(house.inflight.total)
    house.use(gate=gate)
    gate.is_open = True
    for raw, expected in ((BODYLESS, [0]), (ASKED, [0])):
        exchange, _ = await house.route(raw)
        exchange.finish(FinishCause.COMPLETED, 200)
        assert freed == expected
    house.director.begin().finish(FinishCause.CLIENT_GONE)
    assert freed == [0]


@pytest.mark.parametrize(
    ("is_open", "asks_others", "at_once"),
    [(True, False, True), (False, False, False), (True, True, False), (None, False, True)],
)
async def test_a_decision_is_made_at_once_unless_something_may_wait(
    house: Any, gate: HeldGate, is_open: bool | None, asks_others: bool, at_once: bool
) -> None:
    @dataclass
    class Asking:
        timeout_seconds: float = 1.0

        async def look_up(self, request: Any, candidates: Sequence[Any], attributes: Any) -> Any:
            return request

    house.use(producers=[Asking()] if asks_others else [], gate=None if is_open is None else gate)
    exchange = house.director.begin()
    gate.is_open = bool(is_open)
    assert exchange.decides_at_once(RawRequest({}, b"")) is at_once


async def test_a_waiting_request_continues_with_its_first_configuration(
    house: Any, gate: HeldGate
) -> None:
    async with held(house, gate) as (exchange, routing):
        house.use()
        await house.route(RawRequest({**PATH, "x-request-id": "id-2"}, BODY))
        assert [one.request_id for one in house.recorder.decisions] == ["id-2"]
        gate.let_in("id-1")
        await routing
        exchange.finish(FinishCause.COMPLETED, 200)
    assert [one.ends for one in gate.passes] == [[FinishCause.COMPLETED]]


async def test_the_gate_is_given_the_means_to_stop_a_request(house: Any, gate: HeldGate) -> None:
    stopped: list[DropReason] = []
    house.use(gate=gate)
    gate.is_open = True
    exchange = house.director.begin(stopped.append)
    await exchange.route(ASKED)
    evict = gate.evictions["id-1"]
    evict(DropReason.EVICTED)
    exchange.finish(FinishCause.EVICTED, 429)
    assert stopped == [DropReason.EVICTED]
    assert gate.passes == [Pass(0.0, ["default/pod-1"], [FinishCause.EVICTED])]


DECODED = b'{"model":"m","prompt":"p","max_tokens":7}'
PAYLOAD = {"model": "m", "prompt": "p", "max_tokens": 7}


def request(raw: RawRequest, **changes: Any) -> InferenceRequest:
    made = InferenceRequest("id-1", raw.headers, ParsedBody(Api.COMPLETIONS, "m"), "m", "m")
    return replace(made, size_bytes=len(raw.body or b""), **changes)


def estimated(raw: RawRequest, **changes: Any) -> int:
    return held_bytes(request(raw, **changes), raw)


@pytest.mark.parametrize(
    ("more", "at_least"),
    [
        ({"body": DECODED + bytes(1000)}, 1000),
        ({"headers": {**PATH, "x-long": "v" * 1000}}, 1000),
        ({"headers": {**PATH, "n" * 1000: "v"}}, 1000),
        ({"headers": {**PATH, "x-wide": "v" * 1000 + "🦙"}}, 4000),
        ({"subset_hint": ["10.0.0.1:8000"] * 100}, 1300),
    ],
)
def test_the_received_bytes_count(more: dict[str, Any], at_least: int) -> None:
    plain = {"headers": PATH, "body": DECODED}
    assert estimated(RawRequest(**{**plain, **more})) >= estimated(RawRequest(**plain)) + at_least


def test_the_stored_part_of_the_decoded_body_counts() -> None:
    raw = RawRequest(PATH, b"")
    least = estimated(raw)
    assert least > REQUEST_BYTES
    tokens = (bytes(4000), bytes(4000))
    assert estimated(raw, prompts=tokens) >= least + 4000
    features = ((MultiModalFeature("image", "h" * 64, 0, 10),) * 3,)
    assert estimated(raw, features=features) >= least + 3 * 200
    named = ParsedBody(Api.COMPLETIONS, model="m" * 3000, cache_salt="ж" * 1000)
    assert estimated(raw, body=named) >= least + 5000


def test_token_ids_that_two_name_are_held_once() -> None:
    raw, prompt = RawRequest(PATH, DECODED), bytes(4000)
    body = ParsedBody(Api.COMPLETIONS, "m", prompts=(prompt,))
    assert estimated(raw, body=body, prompts=(prompt,)) == estimated(raw, body=body)


async def test_a_body_is_decoded_again_after_the_wait(house: Any, gate: HeldGate) -> None:
    async with held(house, gate, RawRequest(PATH, DECODED)) as (_, routing):
        shown = house.recorder.waiting[0].request
        assert (shown.body.payload, shown.body.max_output_tokens) == (None, 7)
        assert shown.held_bytes > shown.size_bytes == len(DECODED)
        gate.let_in("id-1")
        decision = await routing
        ((decided, _, _),) = house.scheduler.calls
        assert (decided.body.payload, decided.held_bytes) == (PAYLOAD, 0)
        assert decision.body is None


async def test_an_inline_decision_decodes_the_body_once(house: Any) -> None:
    class Closing:
        answers = iter((True, False))

        @property
        def is_open(self) -> bool:
            return next(self.answers)

        async def admit(self, request: InferenceRequest, evict: object) -> Pass:
            return Pass()

    house.use(gate=Closing())
    exchange = house.director.begin()
    raw = RawRequest(PATH, DECODED)
    assert exchange.decides_at_once(raw)
    await exchange.route(raw)
    exchange.finish(FinishCause.COMPLETED, 200)
    shown = house.recorder.waiting[0].request
    ((decided, _, _),) = house.scheduler.calls
    assert shown.body is decided.body
    assert (shown.body.payload, shown.held_bytes) == (PAYLOAD, 0)


async def test_a_body_that_a_processor_changed_survives_the_wait(
    house: Any, gate: HeldGate
) -> None:
    """A changed body could not be decoded from the received bytes again."""

    @dataclass
    class Renaming:
        def process(self, request: InferenceRequest) -> InferenceRequest:
            payload = {**(request.body.payload or {}), "prompt": "another"}
            return replace(request, body=replace(request.body, payload=payload))

    raw = RawRequest(PATH, DECODED)
    async with held(house, gate, raw, processors=(Renaming(),)) as (_, routing):
        gate.let_in("id-1")
        decision = await routing
        ((decided, _, _),) = house.scheduler.calls
        assert decided.body.payload["prompt"] == "another"
        assert b'"another"' in decision.body


def num_exchanges() -> int:
    return sum(isinstance(each, Exchange) for each in gc.get_objects())


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_request_that_is_over_is_free_at_once(house: Any, is_open: bool) -> None:
    """The garbage collector would free its body much later, and pause the process."""
    gate = HeldGate(is_open=is_open)
    house.use(gate=gate)
    gc.collect()
    num_others = num_exchanges()
    gc.disable()
    try:
        stream: list[Any] = []
        exchange = house.director.begin(stream.append)
        stream.append(exchange)  # a stream holds its exchange
        if is_open:
            decision = await exchange.route(RawRequest(PATH, DECODED))
        else:
            routing = asyncio.create_task(exchange.route(RawRequest(PATH, DECODED)))
            await gate.came.wait()
            gate.let_in("id-1")
            decision = await routing
            del routing
        exchange.finish(FinishCause.COMPLETED, 200)
        for stored in (*vars(house.recorder).values(), house.scheduler.calls, gate.evictions):
            stored.clear()
        del exchange, decision, stream
        assert num_exchanges() == num_others
    finally:
        gc.enable()


PATH_ALONE = {":path": "/v1/completions"}
REQUESTS = (
    RawRequest({**PATH_ALONE, "x-request-id": "id-1"}, b'{"model":"m","prompt":"p"}'),
    RawRequest({**PATH_ALONE, "x-llm-d-model-name-rewrite": "n"}, b'{"model":"m","prompt":"p"}'),
    RawRequest(PATH_ALONE, b"{"),
    RawRequest(PATH_ALONE, b'{"model":"m","prompt":"p"}', subset_hint=("10.9.9.9",)),
    RawRequest(PATH_ALONE, None),
    RawRequest({":path": "/v1/rerank"}, b"\xff"),
)


@dataclass
class Lease:
    rng: Random
    chance: float
    held: Counter[str] = field(default_factory=Counter)
    timeout_seconds: float = 0.4

    async def look_up(self, request: Any, candidates: Any, attributes: Any) -> InferenceRequest:
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

    def request_ended(self, flight: Any, cause: Any, usage: Any, now_seconds: float) -> None:
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
