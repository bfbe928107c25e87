"""Requests that wait at a gate, are let in, refused, or given up there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from picker.errors import Code, DropReason, RefusedError
from picker.types import Candidate, Endpoint, FinishCause, RawRequest
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
async def held(house: Any, gate: HeldGate, raw: RawRequest = ASKED) -> AsyncIterator[Any]:
    house.use(gate=gate)
    exchange = house.director.begin()
    routing = asyncio.get_running_loop().create_task(exchange.route(raw))
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
