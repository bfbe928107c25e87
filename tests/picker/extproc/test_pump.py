"""The pump over an in-memory transport: tasks, cancellation, and the one finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from pump_wire import BODY, HEADERS, RESPONSE_END, RESPONSE_HEADERS, TRAILERS, Wire, stream

from picker.errors import RefusedError, no_endpoints
from picker.extproc.pump import PATIENCE_SECONDS, StreamFailedError
from picker.types import FinishCause, RawRequest, RouteDecision

BUFFERED, DUPLEX = 2, 4
MakeDirector = Callable[..., Any]


def headers_in(mode: int) -> bytes:
    """The headers of a request whose bodies are shown in that mode."""
    modes = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=0)
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), protocol_config=modes)
    return bytes(message.SerializeToString())


async def test_a_request_goes_through_all_phases(director: MakeDirector) -> None:
    """Headers and body are answered in order, the response passes, and the end is recorded."""
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        wire.send(RESPONSE_HEADERS, RESPONSE_END)
        assert [await wire.reply(), await wire.reply()] == ["response_headers", "response_body"]
        wire.send(None)
        await task
    (exchange,) = source.exchanges
    assert exchange.finished.result() == (FinishCause.COMPLETED, None, None)
    assert exchange.finish_calls == 1


async def test_the_end_of_the_stream_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    """A client that leaves while its request waits frees its place at once."""
    held = held_routing()
    wire, source = Wire(), director(held)
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await held.started.wait()
        wire.send(None)
        await task
    (exchange,) = source.exchanges
    assert exchange.cancelled
    assert exchange.finished.result() == (FinishCause.CLIENT_GONE, None, None)


@pytest.mark.parametrize(
    ("stopping", "cause"), [(False, FinishCause.CLIENT_GONE), (True, FinishCause.SHUTDOWN)]
)
async def test_a_reset_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any], stopping: bool, cause: FinishCause
) -> None:
    """The transport cancels the stream; the cause says whether we or the client left."""
    held = held_routing()
    wire, source = Wire(), director(held)
    async with stream(wire, source, stopping=stopping) as task:
        wire.send(HEADERS, BODY)
        await held.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (exchange,) = source.exchanges
    assert exchange.cancelled
    assert exchange.finished.result() == (cause, None, None)


async def test_trailers_are_read_while_the_decision_is_pending(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    """The stream is read on during routing, and the deferred reply comes last."""
    held = held_routing()
    wire, source = Wire(), director(held)
    async with stream(wire, source):
        wire.send(HEADERS, BODY)
        await held.started.wait()
        wire.send(TRAILERS)
        await wire.inbound.join()
        assert wire.outbound.empty()
        held.release.set()
        kinds = [await wire.reply() for _ in range(3)]
    assert kinds == ["request_headers", "request_body", "request_trailers"]


async def test_the_proxys_own_reply_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    """When the proxy has answered the client, nobody waits for the decision."""
    held = held_routing()
    wire, source = Wire(), director(held)
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await held.started.wait()
        wire.send(RESPONSE_HEADERS, RESPONSE_END)
        assert [await wire.reply(), await wire.reply()] == ["response_headers", "response_body"]
        wire.send(None)
        await task
    (exchange,) = source.exchanges
    assert exchange.cancelled
    assert exchange.finished.result() == (FinishCause.CLIENT_GONE, None, None)


async def test_a_refusal_is_answered_and_ends_the_stream(director: MakeDirector) -> None:
    """The stream does not wait for the proxy to close it after an immediate answer."""

    async def refuse(raw: RawRequest) -> RouteDecision:
        raise no_endpoints()

    wire, source = Wire(), director(refuse)
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        assert await wire.reply() == "immediate_response"
        await task
    assert source.exchanges[0].finished.result() == (FinishCause.REFUSED, 503, None)


async def test_a_body_over_the_limit_ends_the_stream(director: MakeDirector) -> None:
    """The limit of the options reaches the machine."""
    large = pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(1001)))
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(HEADERS, large.SerializeToString())
        assert await wire.reply() == "immediate_response"
        await task
    assert source.exchanges[0].finished.result() == (FinishCause.REFUSED, 413, None)


async def test_a_bug_while_routing_is_a_500_and_a_log_line(
    director: MakeDirector, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is answered, the details stay with us."""

    async def crash(raw: RawRequest) -> RouteDecision:
        raise ZeroDivisionError("secret detail")

    wire, source = Wire(), director(crash)
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        reply = pb.ProcessingResponse.FromString(await wire.outbound.get()).immediate_response
        await task
    assert reply.status.code == 500
    assert b"secret" not in reply.body
    assert "secret detail" in caplog.text
    assert source.exchanges[0].finished.result() == (FinishCause.REFUSED, 500, None)


@pytest.mark.parametrize("messages", [(BODY,), (b"\xff\xff",), (HEADERS, HEADERS)])
async def test_a_broken_order_or_message_aborts_the_stream(
    director: MakeDirector, messages: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is named as the culprit and the exchange still finishes."""
    wire, source = Wire(), director()
    async with stream(wire, source) as task:
        wire.send(*messages)
        with pytest.raises(StreamFailedError) as failure:
            await task
    assert failure.value.peer_at_fault
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert source.exchanges[0].finished.result() == (FinishCause.RESET, None, None)


@pytest.mark.parametrize("error", [StreamFailedError("gone", True), ZeroDivisionError()])
@pytest.mark.parametrize("fails_at", [0, 2])
async def test_a_write_that_fails_still_finishes_once(
    director: MakeDirector, error: Exception, fails_at: int
) -> None:
    """Neither the routing task's nor the reader's writes can lose the finish."""
    wire, source = Wire(), director()
    writes = 0

    async def write(message: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes > fails_at:
            raise error
        await wire.outbound.put(message)

    wire.write = write  # type: ignore[method-assign]
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        if fails_at == 2:
            assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
            wire.send(RESPONSE_HEADERS)
        with pytest.raises(StreamFailedError):
            await task
    (exchange,) = source.exchanges
    assert exchange.finished.result()[0] is FinishCause.RESET
    assert exchange.finish_calls == 1


async def test_a_proxy_that_closes_its_side_early_still_gets_its_whole_answer(
    director: MakeDirector,
) -> None:
    """Once a decision that had to wait is made, an orderly end does not cut the replies off."""

    async def decide(raw: RawRequest) -> RouteDecision:
        return RouteDecision("10.0.0.1:8000")

    wire, source = Wire(), director(decide)
    writing, gate = asyncio.Event(), asyncio.Event()

    async def slow_write(message: bytes) -> None:
        writing.set()
        await gate.wait()
        await wire.outbound.put(message)

    wire.write = slow_write  # type: ignore[method-assign]
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await writing.wait()
        wire.send(None)
        await wire.closed.wait()
        gate.set()
        await task
    assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
    assert source.exchanges[0].finish_calls == 1


async def test_refusals_do_not_swallow_a_cancellation(director: MakeDirector) -> None:
    """A stream that is reset while its refusal is written ends as cancelled, and finishes once."""

    async def refuse(raw: RawRequest) -> RouteDecision:
        raise RefusedError(no_endpoints().code, "no")

    wire, source = Wire(), director(refuse)
    writing = asyncio.Event()

    async def stuck(message: bytes) -> None:
        writing.set()
        await asyncio.Event().wait()

    wire.write = stuck  # type: ignore[method-assign]
    async with stream(wire, source) as task:
        wire.send(HEADERS, BODY)
        await writing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert source.exchanges[0].finish_calls == 1


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_a_proxy_that_counts_the_seconds_is_asked_for_patience(
    director: MakeDirector, held_routing: Callable[[], Any], mode: int
) -> None:
    """Before a decision that waits; one that streams both ways sets no bound, and is not asked."""
    held = held_routing()
    wire, source = Wire(), director(held)
    async with stream(wire, source):
        wire.send(headers_in(mode), BODY)
        if mode == BUFFERED:
            assert await wire.reply() == "request_headers"
            patience = pb.ProcessingResponse.FromString(await wire.outbound.get())
            assert patience.WhichOneof("response") is None
            assert patience.override_message_timeout.seconds == PATIENCE_SECONDS
        await held.started.wait()
        assert wire.outbound.empty()
        held.release.set()
        assert await wire.reply() == ("request_body" if mode == BUFFERED else "request_headers")
        wire.send(None)
    assert source.exchanges[0].finish_calls == 1
