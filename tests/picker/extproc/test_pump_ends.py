"""Streams of the pump that the picker ends from its side, and messages that it does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from pump_wire import BODY, HEADERS, RESPONSE_END, RESPONSE_HEADERS, Wire, stream

from picker.errors import DROP_REASON_HEADER, RETRY_AFTER_HEADER, DropReason
from picker.types import FinishCause, RawRequest, RouteDecision

UNSEEN = pb.ProcessingRequest(  # a proxy that shows no response bodies
    request_headers={}, protocol_config={"request_body_mode": 4, "response_body_mode": 0}
).SerializeToString()
MakeDirector = Callable[..., Any]


async def test_a_response_that_is_none_of_ours_ends_the_stream_after_the_answer(
    director: MakeDirector,
) -> None:
    """The picker closes first, in order, and does not wait for the proxy."""

    async def skip(raw: RawRequest) -> RouteDecision:
        return RouteDecision("10.0.0.1:8000", skip_response=True)

    wire, source = Wire(), director(skip)
    async with stream(wire, source) as task:
        wire.send(UNSEEN, BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        await task
    assert source.exchanges[0].finished.result() == (FinishCause.SKIPPED, None, None)


async def test_a_message_of_an_unknown_kind_is_no_reason_to_give_up(
    director: MakeDirector,
) -> None:
    """A newer proxy is served as far as it goes on by itself."""
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(HEADERS, b"\x9a\x06\x02hi", BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        wire.send(RESPONSE_HEADERS, RESPONSE_END, None)
        await task
    assert source.exchanges[0].finished.result() == (FinishCause.COMPLETED, None, None)


class EvictableDirector:
    """Opens one exchange, which may be evicted."""

    def __init__(self, exchange: Any) -> None:
        self.exchange = exchange
        self.evict: Callable[[DropReason], None] | None = None

    def begin(self) -> EvictableDirector:
        """Itself, for there is one stream."""
        return self

    def allow_eviction(self, evict: Callable[[DropReason], None]) -> None:
        """Remember how."""
        self.evict = evict

    decides_at_once = False

    async def route(self, raw: RawRequest) -> RouteDecision:
        """As the exchange does."""
        decision: RouteDecision = await self.exchange.route(raw)
        return decision

    def finish(self, *told: Any) -> None:
        """Tell the exchange."""
        self.exchange.finish(*told)


async def test_an_eviction_answers_the_client_and_ends_the_stream(director: MakeDirector) -> None:
    """Whatever the stream waits for at that moment, and only once."""
    wire, source = Wire(), EvictableDirector(director().begin())
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        assert source.evict is not None
        source.evict(DropReason.EVICTED_PRIORITY)
        source.evict(DropReason.EVICTED)
        reply = pb.ProcessingResponse.FromString(await wire.outbound.get()).immediate_response
        await task
        source.evict(DropReason.EVICTED)  # too late: nothing happens
    assert (reply.status.code, reply.body) == (429, b"request evicted by flow control")
    headers = {one.header.key: one.header.raw_value for one in reply.headers.set_headers}
    assert headers == {DROP_REASON_HEADER: b"evicted-priority", RETRY_AFTER_HEADER: b"1"}
    assert wire.outbound.empty()
    assert source.exchange.finished.result() == (FinishCause.EVICTED, 429, None)


async def test_an_eviction_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    """It holds nothing any more."""
    held = held_routing()
    wire, source = Wire(), EvictableDirector(director(held).begin())
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await held.started.wait()
        assert source.evict is not None
        source.evict(DropReason.EVICTED)
        assert await wire.reply() == "immediate_response"
        await task
    assert source.exchange.cancelled
    assert source.exchange.finish_calls == 1


async def test_an_eviction_while_the_stream_is_being_reset_does_nothing(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    """The reset has had the last word."""
    held = held_routing()
    wire, source = Wire(), EvictableDirector(director(held).begin())
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await held.started.wait()
        task.cancel()
        assert source.evict is not None
        source.evict(DropReason.EVICTED)
        with pytest.raises(asyncio.CancelledError):
            await task
        source.evict(DropReason.EVICTED)
    assert source.exchange.finished.result()[0] in (FinishCause.CLIENT_GONE, FinishCause.EVICTED)
    assert source.exchange.finish_calls == 1
