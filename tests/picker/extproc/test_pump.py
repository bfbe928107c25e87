"""The pump on an in-memory call: routing tasks, endings, and the one finish."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from picker.errors import DROP_REASON_HEADER, RETRY_AFTER_HEADER, DropReason, no_endpoints
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.pump import OVERRIDE_TIMEOUT_SECONDS, StreamMetrics, code_name
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Abort, RpcError, Status
from picker.types import FinishCause, RawRequest, RouteDecision
from tests.support.picker.pump_wire import (
    BODY,
    HEADERS,
    LARGE,
    RESPONSE_END,
    RESPONSE_HEADERS,
    TRAILERS,
    Wire,
    stream,
)

BUFFERED, DUPLEX = 2, 4
UNKNOWN_KIND = b"\x9a\x06\x02hi"
MakeDirector = Callable[..., Any]


def headers_in(mode: int) -> bytes:
    modes = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=0)
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), protocol_config=modes)
    return bytes(message.SerializeToString())


async def refuse(raw: RawRequest) -> RouteDecision:
    raise no_endpoints()


async def crash(raw: RawRequest) -> RouteDecision:
    raise ZeroDivisionError("secret detail")


async def skip(raw: RawRequest) -> RouteDecision:
    return RouteDecision("10.0.0.1:8000", skip_response=True)


async def test_a_request_goes_through_all_phases(director: MakeDirector) -> None:
    source = director()
    async with stream(source) as wire:
        wire.play(HEADERS, UNKNOWN_KIND, BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        wire.play(RESPONSE_HEADERS, RESPONSE_END)
        assert [await wire.reply(), await wire.reply()] == ["response_headers", "response_body"]
        wire.play(None)
        await wire.ended
    (exchange,) = source.exchanges
    assert exchange.finished.result() == (FinishCause.COMPLETED, None, None)
    assert exchange.finish_calls == 1


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (None, FinishCause.CLIENT_GONE),
        (Abort.CANCELLED, FinishCause.CLIENT_GONE),
        (Abort.SHUTDOWN, FinishCause.SHUTDOWN),
        (Abort.BROKEN, FinishCause.RESET),
        (HEADERS, FinishCause.RESET),
    ],
)
async def test_every_end_of_the_stream_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any], end: Any, cause: FinishCause
) -> None:
    held = held_routing()
    source = director(held)
    async with stream(source) as wire:
        wire.play(HEADERS, BODY)
        await held.started.wait()
        if isinstance(end, Abort):
            await wire.abort(end)
        else:
            wire.play(end, BODY)
            assert not source.exchanges[0].finished.done()
            await asyncio.gather(wire.ended, return_exceptions=True)
    (exchange,) = source.exchanges
    assert exchange.cancelled
    assert exchange.finished.result() == (cause, None, None)
    assert exchange.finish_calls == 1


async def test_messages_are_taken_while_the_decision_is_pending(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    held = held_routing()
    async with stream(director(held)) as wire:
        wire.play(HEADERS, BODY)
        await held.started.wait()
        wire.play(TRAILERS)
        assert wire.outbound.empty()
        held.release.set()
        kinds = [await wire.reply() for _ in range(3)]
    assert kinds == ["request_headers", "request_body", "request_trailers"]


async def test_the_proxys_own_reply_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    held = held_routing()
    source = director(held)
    async with stream(source) as wire:
        wire.play(HEADERS, BODY)
        await held.started.wait()
        wire.play(RESPONSE_HEADERS, RESPONSE_END)
        assert [await wire.reply(), await wire.reply()] == ["response_headers", "response_body"]
        await asyncio.sleep(0)
        wire.play(None)
        await wire.ended
    (exchange,) = source.exchanges
    assert exchange.cancelled
    assert exchange.finished.result() == (FinishCause.CLIENT_GONE, None, None)


@pytest.mark.parametrize(
    ("routing", "messages", "finished"),
    [
        (refuse, [HEADERS, BODY], (FinishCause.REFUSED, 503, None)),
        (crash, [HEADERS, BODY], (FinishCause.REFUSED, 500, None)),
        (
            refuse,
            [HEADERS, pb.ProcessingRequest(request_body={"body": bytes(1001)}).SerializeToString()],
            (FinishCause.REFUSED, 413, None),
        ),
        (refuse, [headers_in(DUPLEX), LARGE], (FinishCause.REFUSED, 429, None)),
    ],
    ids=["no endpoint", "a bug", "too large", "no room"],
)
async def test_a_refusal_is_answered_and_ends_the_stream(
    director: MakeDirector, caplog: Any, routing: Any, messages: list[Any], finished: Any
) -> None:
    source = director(routing)
    async with stream(source) as wire:
        wire.play(*messages)
        reply = pb.ProcessingResponse.FromString(await wire.outbound.get())
        await wire.ended
    assert reply.immediate_response.status.code == finished[1]
    assert b"secret" not in reply.immediate_response.body
    assert ("secret detail" in caplog.text) == (routing is crash and finished[1] == 500)
    assert source.exchanges[0].finished.result() == finished


async def test_a_response_is_not_broken_off_for_want_of_room(director: MakeDirector) -> None:
    """The limit on room is for requests that are still to come."""
    async with stream(director()) as wire:
        wire.play(LARGE, RESPONSE_HEADERS)
        assert await wire.reply() == "response_headers"
        wire.play(LARGE, RESPONSE_END)
        assert await wire.reply() == "response_body"
        wire.play(None)
        await wire.ended


async def test_a_response_that_is_none_of_ours_ends_the_stream_after_the_answer(
    director: MakeDirector,
) -> None:
    source = director(skip)
    async with stream(source) as wire:
        wire.play(headers_in(DUPLEX), BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        await wire.ended
    assert source.exchanges[0].finished.result() == (FinishCause.SKIPPED, None, None)


@pytest.mark.parametrize("messages", [(BODY,), (b"\xff\xff",), (HEADERS, HEADERS)])
async def test_a_broken_order_or_message_aborts_the_stream(
    director: MakeDirector, messages: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    source = director()
    async with stream(source) as wire:
        wire.play(*messages)
        with pytest.raises(RpcError) as failure:
            await wire.ended
    assert failure.value.status is Status.INVALID_ARGUMENT
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert source.exchanges[0].finished.result() == (FinishCause.RESET, None, None)


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_step_that_fails_still_finishes_once(
    director: MakeDirector, held_routing: Callable[[], Any], is_later: bool
) -> None:
    held = held_routing()
    source = director(held) if is_later else director()
    async with stream(source) as wire:
        wire.play(HEADERS)
        wire.send = lambda message: 1 / 0  # type: ignore[assignment]
        wire.play(BODY)
        held.release.set()
        with pytest.raises(RpcError) as failure:
            await wire.ended
    assert failure.value.status is Status.INTERNAL
    (exchange,) = source.exchanges
    assert (exchange.finished.result()[0], exchange.finish_calls) == (FinishCause.RESET, 1)


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_a_proxy_that_counts_the_seconds_is_asked_to_wait_longer(
    director: MakeDirector, held_routing: Callable[[], Any], mode: int
) -> None:
    """A proxy that streams both ways sets no bound and is not asked."""
    held = held_routing()
    source = director(held)
    async with stream(source) as wire:
        wire.play(headers_in(mode), BODY)
        if mode == BUFFERED:
            assert await wire.reply() == "request_headers"
            asked = pb.ProcessingResponse.FromString(await wire.outbound.get())
            assert asked.WhichOneof("response") is None
            assert asked.override_message_timeout.seconds == OVERRIDE_TIMEOUT_SECONDS
        await held.started.wait()
        assert wire.outbound.empty()
        held.release.set()
        assert await wire.reply() == ("request_body" if mode == BUFFERED else "request_headers")
        wire.play(None)
    assert source.exchanges[0].finish_calls == 1


# Evictions


async def test_an_eviction_answers_the_client_and_ends_the_stream(director: MakeDirector) -> None:
    source = director()
    async with stream(source) as wire:
        wire.play(HEADERS, BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        source.exchanges[0].evict(DropReason.EVICTED_PRIORITY)
        source.exchanges[0].evict(DropReason.EVICTED)
        reply = pb.ProcessingResponse.FromString(await wire.outbound.get()).immediate_response
        await wire.ended
        source.exchanges[0].evict(DropReason.EVICTED)  # too late: nothing happens
        await asyncio.sleep(0)
    assert reply.status.code == 429
    assert b"was stopped to make room for others" in reply.body
    headers = {one.header.key: one.header.raw_value for one in reply.headers.set_headers}
    assert headers == {
        DROP_REASON_HEADER: b"evicted-priority",
        RETRY_AFTER_HEADER: b"1",
        "content-type": b"application/json",
    }
    assert wire.outbound.empty()
    assert source.exchanges[0].finished.result() == (FinishCause.EVICTED, 429, None)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_an_eviction_cancels_a_pending_decision(
    director: MakeDirector, held_routing: Callable[[], Any], is_reset: bool
) -> None:
    held = held_routing()
    source = director(held)
    async with stream(source) as wire:
        wire.play(HEADERS, BODY)
        await held.started.wait()
        source.exchanges[0].evict(DropReason.EVICTED)
        if is_reset:
            await wire.abort(Abort.CANCELLED)
        else:
            assert await wire.reply() == "immediate_response"
            await wire.ended
    assert source.exchanges[0].cancelled
    cause = FinishCause.CLIENT_GONE if is_reset else FinishCause.EVICTED
    assert source.exchanges[0].finished.result()[0] is cause
    assert source.exchanges[0].finish_calls == 1


# Numbers


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (None, "OK"),
        (b"\xff", "InvalidArgument"),
        (Abort.BROKEN, "InvalidArgument"),
        (Abort.CANCELLED, "Canceled"),
        (Abort.SHUTDOWN, "Canceled"),
    ],
)
async def test_a_stream_is_counted_once_whatever_ends_it(
    director: MakeDirector, end: Any, code: str
) -> None:
    metrics, seconds = PickerMetrics(), iter((1.0, 3.5))

    def value(name: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"llm_d_epp_extproc_{name}", labels)

    wire = Wire()
    wire.serve(director(), StreamSettings(), StreamMetrics(metrics, lambda: next(seconds)))
    assert value("streams_inflight") == 1
    if isinstance(end, Abort):
        await wire.abort(end)
    else:
        wire.play(end)
        await asyncio.wait([wire.ended])
        assert (wire.ended.exception() is None) == (end is None)
    assert value("streams_inflight") == 0
    assert value("streams_total", code=code) == 1
    assert value("stream_duration_seconds_sum") == 2.5


def test_codes_are_spelt_as_in_go() -> None:
    """Dashboards select by Go's spelling of the codes."""
    statuses = (Status.OK, Status.CANCELLED, Status.DEADLINE_EXCEEDED)
    assert [code_name(one) for one in statuses] == ["OK", "Canceled", "DeadlineExceeded"]
