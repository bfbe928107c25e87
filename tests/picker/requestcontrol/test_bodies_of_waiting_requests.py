"""The memory of a waiting request, and its estimate."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import RefusedError
from picker.requestcontrol.bodies import REQUEST_BYTES, held_bytes
from picker.requestcontrol.director import Exchange
from picker.types import (
    Api,
    FinishCause,
    InferenceRequest,
    MultiModalFeature,
    ParsedBody,
    RawRequest,
)
from tests.support.picker.held_gate import HeldGate, Pass

PATH = {":path": "/v1/completions", "x-request-id": "id-1"}
BODY = b'{"model":"m","prompt":"p","max_tokens":7}'
PAYLOAD = {"model": "m", "prompt": "p", "max_tokens": 7}


def request(raw: RawRequest, **changes: Any) -> InferenceRequest:
    made = InferenceRequest("id-1", raw.headers, ParsedBody(Api.COMPLETIONS, "m"), "m", "m")
    return replace(made, size_bytes=len(raw.body or b""), **changes)


def held(raw: RawRequest, **changes: Any) -> int:
    return held_bytes(request(raw, **changes), raw)


@asynccontextmanager
async def waiting(house: Any, gate: HeldGate, **plugins: Any) -> AsyncIterator[Any]:
    house.use(gate=gate, **plugins)
    exchange = house.director.begin()
    routing = asyncio.get_running_loop().create_task(exchange.route(RawRequest(PATH, BODY)))
    await gate.came.wait()
    try:
        yield exchange, routing
    finally:
        routing.cancel()
        with suppress(asyncio.CancelledError, RefusedError):
            await routing
        exchange.finish(FinishCause.COMPLETED, 200)


@pytest.mark.parametrize(
    ("more", "at_least"),
    [
        ({"body": BODY + bytes(1000)}, 1000),
        ({"headers": {**PATH, "x-long": "v" * 1000}}, 1000),
        ({"headers": {**PATH, "n" * 1000: "v"}}, 1000),
        ({"headers": {**PATH, "x-wide": "v" * 1000 + "🦙"}}, 4000),
        ({"subset_hint": ["10.0.0.1:8000"] * 100}, 1300),
    ],
)
def test_the_received_bytes_count(more: dict[str, Any], at_least: int) -> None:
    plain = {"headers": PATH, "body": BODY}
    assert held(RawRequest(**{**plain, **more})) >= held(RawRequest(**plain)) + at_least


def test_the_stored_part_of_the_decoded_body_counts() -> None:
    raw = RawRequest(PATH, b"")
    least = held(raw)
    assert least > REQUEST_BYTES
    tokens = (bytes(4000), bytes(4000))
    assert held(raw, prompts=tokens) >= least + 4000
    features = ((MultiModalFeature("image", "h" * 64, 0, 10),) * 3,)
    assert held(raw, features=features) >= least + 3 * 200
    named = ParsedBody(Api.COMPLETIONS, model="m" * 3000, cache_salt="ж" * 1000)
    assert held(raw, body=named) >= least + 5000


def test_token_ids_that_two_name_are_held_once() -> None:
    raw, prompt = RawRequest(PATH, BODY), bytes(4000)
    body = ParsedBody(Api.COMPLETIONS, "m", prompts=(prompt,))
    assert held(raw, body=body, prompts=(prompt,)) == held(raw, body=body)


async def test_a_body_is_decoded_again_after_the_wait(house: Any) -> None:
    gate = HeldGate()
    async with waiting(house, gate) as (_, routing):
        shown = house.recorder.waiting[0].request
        assert (shown.body.payload, shown.body.max_output_tokens) == (None, 7)
        assert shown.held_bytes > shown.size_bytes == len(BODY)
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
    raw = RawRequest(PATH, BODY)
    assert exchange.decides_at_once(raw)
    await exchange.route(raw)
    exchange.finish(FinishCause.COMPLETED, 200)
    shown = house.recorder.waiting[0].request
    ((decided, _, _),) = house.scheduler.calls
    assert shown.body is decided.body
    assert (shown.body.payload, shown.held_bytes) == (PAYLOAD, 0)


async def test_a_body_that_a_processor_changed_survives_the_wait(house: Any) -> None:
    """A changed body could not be decoded from the received bytes again."""

    @dataclass
    class Renaming:
        def process(self, request: InferenceRequest) -> InferenceRequest:
            payload = {**(request.body.payload or {}), "prompt": "another"}
            return replace(request, body=replace(request.body, payload=payload))

    gate = HeldGate()
    async with waiting(house, gate, processors=(Renaming(),)) as (_, routing):
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
            decision = await exchange.route(RawRequest(PATH, BODY))
        else:
            routing = asyncio.get_running_loop().create_task(exchange.route(RawRequest(PATH, BODY)))
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
