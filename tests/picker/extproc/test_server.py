"""Streams on calls: the pump in memory, the server on a real socket, and the choice of a pool."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.pool_choice import PoolChoice
from picker.errors import DROP_REASON_HEADER, RETRY_AFTER_HEADER, DropReason, no_endpoints
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.server import OVERRIDE_TIMEOUT_SECONDS, StreamMetrics, build_server, code_name
from picker.extproc.wire import METHOD
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.calls import Abort, RpcError, Status
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
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
from tests.support.picker.recording_director import HeldRouting, RecordingDirector
from tests.support.waiting import until

BUFFERED, DUPLEX = 2, 4
UNKNOWN_KIND = b"\x9a\x06\x02hi"


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


@asynccontextmanager
async def deciding() -> AsyncIterator[tuple[Wire, HeldRouting, Any]]:
    """Yield a stream whose decision waits, and its exchange."""
    held = HeldRouting()
    source = RecordingDirector(held)
    async with stream(source) as wire:
        wire.play(HEADERS, BODY)
        await held.started.wait()
        yield wire, held, source.exchanges[0]


async def test_a_request_goes_through_all_phases() -> None:
    source = RecordingDirector()
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
    end: Any, cause: FinishCause
) -> None:
    async with deciding() as (wire, _, exchange):
        if isinstance(end, Abort):
            await wire.abort(end)
        else:
            wire.play(end, BODY)
            assert not exchange.finished.done()
            await asyncio.gather(wire.ended, return_exceptions=True)
    assert exchange.cancelled
    assert exchange.finished.result() == (cause, None, None)
    assert exchange.finish_calls == 1


async def test_messages_are_taken_while_the_decision_is_pending() -> None:
    async with deciding() as (wire, held, _):
        wire.play(TRAILERS)
        assert wire.outbound.empty()
        held.release.set()
        kinds = [await wire.reply() for _ in range(3)]
    assert kinds == ["request_headers", "request_body", "request_trailers"]


async def test_the_proxys_own_reply_cancels_a_pending_decision() -> None:
    async with deciding() as (wire, _, exchange):
        wire.play(RESPONSE_HEADERS, RESPONSE_END)
        assert [await wire.reply(), await wire.reply()] == ["response_headers", "response_body"]
        await asyncio.sleep(0)
        wire.play(None)
        await wire.ended
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
    caplog: Any, routing: Any, messages: list[Any], finished: Any
) -> None:
    source = RecordingDirector(routing)
    async with stream(source) as wire:
        wire.play(*messages)
        reply = pb.ProcessingResponse.FromString(await wire.outbound.get())
        await wire.ended
    assert reply.immediate_response.status.code == finished[1]
    assert b"secret" not in reply.immediate_response.body
    assert ("secret detail" in caplog.text) == (routing is crash and finished[1] == 500)
    assert source.exchanges[0].finished.result() == finished


async def test_a_response_is_not_broken_off_for_want_of_room() -> None:
    """The limit on room is for requests that are still to come."""
    async with stream(RecordingDirector()) as wire:
        wire.play(LARGE, RESPONSE_HEADERS)
        assert await wire.reply() == "response_headers"
        wire.play(LARGE, RESPONSE_END)
        assert await wire.reply() == "response_body"
        wire.play(None)
        await wire.ended


async def test_a_response_that_is_none_of_ours_ends_the_stream_after_the_answer() -> None:
    source = RecordingDirector(skip)
    async with stream(source) as wire:
        wire.play(headers_in(DUPLEX), BODY)
        assert [await wire.reply(), await wire.reply()] == ["request_headers", "request_body"]
        await wire.ended
    assert source.exchanges[0].finished.result() == (FinishCause.SKIPPED, None, None)


@pytest.mark.parametrize("messages", [(BODY,), (b"\xff\xff",), (HEADERS, HEADERS)])
async def test_a_broken_order_or_message_aborts_the_stream(
    messages: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    source = RecordingDirector()
    async with stream(source) as wire:
        wire.play(*messages)
        with pytest.raises(RpcError) as failure:
            await wire.ended
    assert failure.value.status is Status.INVALID_ARGUMENT
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert source.exchanges[0].finished.result() == (FinishCause.RESET, None, None)


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_step_that_fails_still_finishes_once(is_later: bool) -> None:
    held = HeldRouting()
    source = RecordingDirector(held) if is_later else RecordingDirector()
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
async def test_a_proxy_that_counts_the_seconds_is_asked_to_wait_longer(mode: int) -> None:
    """A proxy that streams both ways sets no bound and is not asked."""
    held = HeldRouting()
    source = RecordingDirector(held)
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


async def test_an_eviction_answers_the_client_and_ends_the_stream() -> None:
    source = RecordingDirector()
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
async def test_an_eviction_cancels_a_pending_decision(is_reset: bool) -> None:
    async with deciding() as (wire, _, exchange):
        exchange.evict(DropReason.EVICTED)
        if is_reset:
            await wire.abort(Abort.CANCELLED)
        else:
            assert await wire.reply() == "immediate_response"
            await wire.ended
    assert exchange.cancelled
    cause = FinishCause.CLIENT_GONE if is_reset else FinishCause.EVICTED
    assert exchange.finished.result()[0] is cause
    assert exchange.finish_calls == 1


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
async def test_a_stream_is_counted_once_whatever_ends_it(end: Any, code: str) -> None:
    metrics, seconds = PickerMetrics(), iter((1.0, 3.5))

    def value(name: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"llm_d_epp_extproc_{name}", labels)

    wire = Wire()
    wire.serve(RecordingDirector(), StreamSettings(), StreamMetrics(metrics, lambda: next(seconds)))
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


class Fleet:
    def __init__(self) -> None:
        self.servers: list[GrpcServer] = []
        self.channels: list[grpc.aio.Channel] = []

    def options(self, **changes: Any) -> ServerOptions:
        return ServerOptions(**{"host": "127.0.0.1", "port": 0, **changes})

    async def channel_to(self, server: GrpcServer) -> grpc.aio.Channel:
        port = await server.start()
        self.servers.append(server)
        self.channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return self.channels[-1]

    async def call(self, director: Any, **changes: Any) -> Any:
        server = build_server(director, options=self.options(**changes))
        return pb_grpc.ExternalProcessorStub(await self.channel_to(server)).Process()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for channel in fleet.channels:
        await channel.close()
    for server in fleet.servers:
        await server.stop(0)


def request_headers(end_of_stream: bool = False) -> pb.ProcessingRequest:
    headers = pb.HttpHeaders(end_of_stream=end_of_stream)
    headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    return pb.ProcessingRequest(request_headers=headers)


def request_body(body: bytes, end_of_stream: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end_of_stream))


def response_headers(status: bytes = b"200") -> pb.ProcessingRequest:
    headers = pb.HttpHeaders()
    headers.headers.headers.add(key=":status", raw_value=status)
    return pb.ProcessingRequest(response_headers=headers)


async def test_a_request_with_a_body_is_routed_and_its_response_passes(fleet: Fleet) -> None:
    source = RecordingDirector()
    call = await fleet.call(source)
    await call.write(request_headers())
    await call.write(request_body(b'{"model":', end_of_stream=False))
    await call.write(request_body(b'"m"}'))
    headers = (await call.read()).request_headers.response
    assert headers.header_mutation.set_headers[0].header.raw_value == b"10.0.0.1:8000"
    body = (await call.read()).request_body.response.body_mutation.streamed_response
    assert (body.body, body.end_of_stream) == (b'{"model":"m"}', True)
    await call.write(response_headers())
    assert (await call.read()).HasField("response_headers")
    await call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"out")))
    passed = (await call.read()).response_body.response.body_mutation.streamed_response
    assert passed.body == b"out"
    await call.write(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert (await call.read()).HasField("response_trailers")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    (exchange,) = source.exchanges
    assert await exchange.finished == (FinishCause.COMPLETED, 200, None)
    assert [raw.body for raw in exchange.requests] == [b'{"model":"m"}']


async def test_stopping_cancels_what_outlives_the_grace(fleet: Fleet) -> None:
    held = HeldRouting()
    source = RecordingDirector(held)
    call = await fleet.call(source)
    await call.write(request_headers())
    await call.write(request_body(b"{}"))
    await held.started.wait()
    await fleet.servers[0].stop(0)
    assert await source.exchanges[0].finished == (FinishCause.SHUTDOWN, None, None)


async def test_a_taken_port_is_an_error_with_its_address(fleet: Fleet) -> None:
    first = build_server(RecordingDirector(), options=fleet.options())
    port = await first.start()
    fleet.servers.append(first)
    second = build_server(RecordingDirector(), options=fleet.options(port=port))
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        await second.start()


async def test_health_is_answered_where_it_is_configured(fleet: Fleet) -> None:
    health = HealthService(lambda: True)
    servers = [
        build_server(RecordingDirector(), options=fleet.options(), health=health),
        GrpcServer(fleet.options(), health.methods()),
    ]
    for server in servers:
        stub = health_pb2_grpc.HealthStub(await fleet.channel_to(server))
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="inference-extension"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    without = await fleet.channel_to(build_server(RecordingDirector(), options=fleet.options()))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_pb2_grpc.HealthStub(without).Check(health_pb2.HealthCheckRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stopping_lets_a_stream_end_within_the_grace(fleet: Fleet) -> None:
    held = HeldRouting()
    source = RecordingDirector(held)
    call = await fleet.call(source)
    await call.write(request_headers(end_of_stream=True))
    await held.started.wait()
    stopping = asyncio.create_task(fleet.servers[0].stop(60))
    held.release.set()
    assert (await call.read()).HasField("request_headers")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    await stopping
    assert (await source.exchanges[0].finished)[0] is not FinishCause.SHUTDOWN


async def test_a_deadline_of_the_caller_ends_the_call(fleet: Fleet) -> None:
    source = RecordingDirector(HeldRouting())
    channel = await fleet.channel_to(build_server(source, options=fleet.options()))
    call = pb_grpc.ExternalProcessorStub(channel).Process(timeout=0.2)
    await call.write(request_headers(end_of_stream=True))
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await source.exchanges[0].finished == (FinishCause.CLIENT_GONE, None, None)


PATIENCE_SECONDS = 60.0
KEYS = ("llama", "x/qwen", "y/qwen")
NAMES = {"llama": "llama", "default/llama": "llama", "x/qwen": "x/qwen", "y/qwen": "y/qwen"}
Fields = Sequence[tuple[str, str | bytes]]


@dataclass
class Scene:
    port: int
    directors: dict[str, Any]
    metrics: PickerMetrics
    channel: grpc.aio.Channel

    def asked(self) -> dict[str, int]:
        return {
            key: len([raw for one in director.exchanges for raw in one.requests])
            for key, director in self.directors.items()
            if director.exchanges
        }

    @property
    def unknown(self) -> float:
        return dict(self.metrics.unknown_pool_total.numbers()).get((), 0.0)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"llm_d_epp_extproc_{name}", labels)

    async def ask(self, *fields: tuple[str, str | bytes]) -> Any:
        call = pb_grpc.ExternalProcessorStub(self.channel).Process(metadata=fields)
        headers = pb.HttpHeaders(end_of_stream=True)
        headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
        await call.write(pb.ProcessingRequest(request_headers=headers))
        answer = await asyncio.wait_for(call.read(), PATIENCE_SECONDS)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        return answer


@asynccontextmanager
async def serving(keys: Sequence[str] = KEYS) -> AsyncIterator[Scene]:
    def routing(key: str) -> Callable[[RawRequest], Any]:
        async def route(raw: RawRequest) -> RouteDecision:
            return RouteDecision(f"10.0.0.{KEYS.index(key)}:1")

        return route

    directors = {key: RecordingDirector(routing(key)) for key in keys}
    metrics = PickerMetrics()
    named = {name: directors[key] for name, key in NAMES.items() if key in directors}
    choice = PoolChoice(named, keys, metrics.unknown_pool_total)
    server = build_server(
        choice.choose,
        options=ServerOptions(host="127.0.0.1", port=0),
        health=HealthService(lambda: True),
        streams=StreamMetrics(metrics, asyncio.get_running_loop().time),
    )
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Scene(port, directors, metrics, channel)
    finally:
        await server.stop(0)


def went_to(answer: Any) -> str:
    mutation = answer.request_headers.response.header_mutation
    (place,) = {
        one.header.raw_value.decode()
        for one in mutation.set_headers
        if one.header.key == "x-gateway-destination-endpoint"
    }
    return KEYS[int(place.removeprefix("10.0.0.").removesuffix(":1"))]


@pytest.mark.parametrize(("name", "key"), [*NAMES.items(), (" llama ", "llama")])
async def test_the_name_says_which_pool(name: str, key: str) -> None:
    async with serving() as scene:
        for count in (1, 2):
            answer = await scene.ask(("x-other", "y/qwen"), ("x-pointsman-pool", name))
            assert went_to(answer) == key
            assert scene.asked() == {key: count}
        assert scene.unknown == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "asks for no pool; its gRPC initial metadata x-pointsman-pool must name one of "),
        ((("x-pool", "llama"),), "asks for no pool"),
        ((("x-pointsman-pool-", "llama"),), "asks for no pool"),
        ((("x-pointsman-pool-bin", b"llama"),), "asks for no pool"),
        ((("x-pointsman-pool", ""),), "asks for another pool than "),
        ((("x-pointsman-pool", "mistral"),), "asks for another pool than "),
        ((("x-pointsman-pool", "qwen"),), "asks for another pool than "),  # there are two
        ((("x-pointsman-pool", "default/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "x/llama"),), "asks for another pool than "),
        ((("x-pointsman-pool", "LLAMA"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama/"),), "asks for another pool than "),
        ((("x-pointsman-pool", "/llama"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama:9012"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama y/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "llama,y/qwen"),), "asks for another pool than "),
        ((("x-pointsman-pool", "x" * 4000),), "asks for another pool than "),
    ],
)
async def test_nothing_is_guessed(fields: Fields, message: str) -> None:
    async with serving() as scene:
        answer = await scene.ask(*fields)
        assert answer.immediate_response.status.code == 500
        text = json.loads(answer.immediate_response.body)["error"]["message"]
        assert message in text
        assert text.endswith("llama, x/qwen, y/qwen")
        assert scene.asked() == {}
        assert scene.unknown == 1


async def test_several_names_are_none() -> None:
    async with serving() as scene:
        for names in (("llama", "y/qwen"), ("y/qwen", "llama"), ("llama", ""), ("z", "llama")):
            answer = await scene.ask(*(("x-pointsman-pool", name) for name in names))
            assert answer.immediate_response.status.code == 500, names
        assert scene.asked() == {}
        assert scene.unknown == 4
        answer = await scene.ask(("x-pointsman-pool", "llama"), ("x-pointsman-pool", "llama"))
        assert went_to(answer) == "llama"


async def test_a_picker_of_one_pool_needs_no_name_but_believes_one() -> None:
    async with serving(("llama",)) as scene:
        assert went_to(await scene.ask()) == "llama"
        assert went_to(await scene.ask(("x-pointsman-pool", "default/llama"))) == "llama"
        answer = await scene.ask(("x-pointsman-pool", "x/qwen"))
        assert answer.immediate_response.status.code == 500
        assert scene.asked() == {"llama": 2}
        assert scene.unknown == 1


async def test_calls_of_one_connection_are_for_different_pools() -> None:
    async with serving() as scene:
        names = [*NAMES, "unknown"] * 20

        async def ask(name: str) -> None:
            answer = await scene.ask(("x-pointsman-pool", name))
            if name == "unknown":
                assert answer.immediate_response.status.code == 500
            else:
                assert went_to(answer) == NAMES[name]

        await asyncio.gather(*map(ask, names))
        assert scene.asked() == {"llama": 40, "x/qwen": 20, "y/qwen": 20}
        assert scene.unknown == 20


async def test_the_streams_of_all_pools_are_counted() -> None:
    async with serving() as scene:
        for name in ("llama", "x/qwen", "unknown"):
            await scene.ask(("x-pointsman-pool", name))
        await until(lambda: scene.value("streams_total", code="OK") == 3)
        assert scene.value("streams_inflight") == 0
        assert scene.value("stream_duration_seconds_count") == 3


async def test_health_needs_no_name() -> None:
    async with serving() as scene:
        stub = health_pb2_grpc.HealthStub(scene.channel)
        for fields in ((), (("x-pointsman-pool", "unknown"),)):
            reply = await stub.Check(health_pb2.HealthCheckRequest(), metadata=fields)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (scene.unknown, scene.asked()) == (0, {})
        assert scene.value("streams_total", code="OK") is None


async def test_the_log_names_what_was_asked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a proxy could fill the log."""
    with caplog.at_level(logging.WARNING, "picker.app.pool_choice"):
        async with serving() as scene:
            for _ in range(3):
                await scene.ask(("x-pointsman-pool", "mistral"))
            await scene.ask(("x-pointsman-pool", "m" * 300))
            for number in range(120):
                await scene.ask(("x-pointsman-pool", f"pool-{number}"))
    lines = [one.getMessage() for one in caplog.records]
    assert lines[0] == (
        "the proxy asks for the pool 'mistral'; its gRPC initial metadata x-pointsman-pool must "
        "name one of llama, x/qwen, y/qwen"
    )
    assert "m" * 100 in lines[1]
    assert "m" * 300 not in lines[1]
    assert len(lines) == 100


async def raw_call(port: int, *fields: tuple[bytes, bytes]) -> None:
    config = h2.config.H2Configuration(
        header_encoding=None, normalize_outbound_headers=False, validate_outbound_headers=False
    )
    peer = h2.connection.H2Connection(config)
    peer.initiate_connection()
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode())]
    head += [(b":authority", b"localhost"), (b"content-type", b"application/grpc")]
    peer.send_headers(1, [*head, (b"te", b"trailers"), *fields])
    headers = pb.HttpHeaders(end_of_stream=True)
    headers.headers.headers.add(key=":path", raw_value=b"/v1/models")
    message = pb.ProcessingRequest(request_headers=headers).SerializeToString()
    peer.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    ended = (h2.events.StreamEnded, h2.events.StreamReset, h2.events.ConnectionTerminated)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(peer.data_to_send())
            while data := await reader.read(65536):
                if any(isinstance(event, ended) for event in peer.receive_data(data)):
                    return
                writer.write(peer.data_to_send())
    finally:
        writer.close()


@pytest.mark.parametrize(
    "fields",
    [
        ((b"X-Pointsman-Pool", b"llama"),),
        ((b"x-pointsman-pool", b"\xff\xfe"),),
        ((b"x-pointsman-pool", b"llama\x00"),),
        ((b"x-pointsman-pool", b"llama\r\nx: y"),),
        ((b"x-pointsman-pool", "llamä".encode()),),
    ],
    ids=["case", "no text", "nul", "lines", "umlaut"],
)
async def test_malformed_fields_are_harmless(
    caplog: pytest.LogCaptureFixture, fields: tuple[tuple[bytes, bytes], ...]
) -> None:
    async with serving() as scene:
        with caplog.at_level(logging.WARNING, "picker.app.pool_choice"):
            await raw_call(scene.port, *fields)
        assert scene.asked() == {}
        said = [one.getMessage() for one in caplog.records if one.name.startswith("picker.")]
        assert all(text.isprintable() for text in said)
        assert went_to(await scene.ask(("x-pointsman-pool", "x/qwen"))) == "x/qwen"
