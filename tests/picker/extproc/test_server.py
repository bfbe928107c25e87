"""The gRPC server on a real socket, called by the client of grpc.aio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.extproc.server import build_server
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
from picker.types import FinishCause

MakeDirector = Callable[..., Any]


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


async def test_a_request_with_a_body_is_routed_and_its_response_passes(
    fleet: Fleet, director: MakeDirector
) -> None:
    source = director()
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


async def test_stopping_cancels_what_outlives_the_grace(
    fleet: Fleet, director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    held = held_routing()
    source = director(held)
    call = await fleet.call(source)
    await call.write(request_headers())
    await call.write(request_body(b"{}"))
    await held.started.wait()
    await fleet.servers[0].stop(0)
    assert await source.exchanges[0].finished == (FinishCause.SHUTDOWN, None, None)


async def test_a_taken_port_is_an_error_with_its_address(
    fleet: Fleet, director: MakeDirector
) -> None:
    first = build_server(director(), options=fleet.options())
    port = await first.start()
    fleet.servers.append(first)
    second = build_server(director(), options=fleet.options(port=port))
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        await second.start()


async def test_health_is_answered_on_the_ext_proc_port_and_on_its_own(
    fleet: Fleet, director: MakeDirector
) -> None:
    health = HealthService(lambda: True)
    servers = [
        build_server(director(), options=fleet.options(), health=health),
        GrpcServer(fleet.options(), health.methods()),
    ]
    for server in servers:
        stub = health_pb2_grpc.HealthStub(await fleet.channel_to(server))
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="inference-extension"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_unknown_method_is_unimplemented(fleet: Fleet, director: MakeDirector) -> None:
    channel = await fleet.channel_to(build_server(director(), options=fleet.options()))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary("/no.such.Service/Method")(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stopping_lets_a_stream_end_within_the_grace(
    fleet: Fleet, director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    held = held_routing()
    source = director(held)
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


async def test_a_deadline_of_the_caller_ends_the_call(
    fleet: Fleet, director: MakeDirector, held_routing: Callable[[], Any]
) -> None:
    source = director(held_routing())
    channel = await fleet.channel_to(build_server(source, options=fleet.options()))
    call = pb_grpc.ExternalProcessorStub(channel).Process(timeout=0.2)
    await call.write(request_headers(end_of_stream=True))
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await source.exchanges[0].finished == (FinishCause.CLIENT_GONE, None, None)
