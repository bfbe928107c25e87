"""The gRPC health service, asked by a real client."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.rpc.health import READINESS, HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer

Status = health_pb2.HealthCheckResponse


class Readiness:
    def __init__(self) -> None:
        self.ready = False

    def __call__(self) -> bool:
        return self.ready


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def stub(readiness: Readiness) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    health = HealthService(readiness, watch_seconds=0.01)
    options = ServerOptions(host="127.0.0.1", port=0)
    server = GrpcServer(options, health.methods())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_readiness_follows_the_application_both_ways(
    stub: health_pb2_grpc.HealthStub, readiness: Readiness
) -> None:
    for ready, status in [(False, Status.NOT_SERVING), (True, Status.SERVING)] * 2:
        readiness.ready = ready
        assert [await check(stub, name) for name in READINESS] == [status] * len(READINESS)


async def test_liveness_does_not_wait_for_the_pool(stub: health_pb2_grpc.HealthStub) -> None:
    """A restart would not help a picker without a pool."""
    assert await check(stub, "liveness") == Status.SERVING


async def test_an_unknown_name_is_not_found(stub: health_pb2_grpc.HealthStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await check(stub, "typo")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_list_holds_every_name(stub: health_pb2_grpc.HealthStub) -> None:
    reply = await stub.List(health_pb2.HealthListRequest())
    assert set(reply.statuses) == {"liveness", *READINESS}


async def test_a_request_that_is_no_health_request_is_refused(readiness: Readiness) -> None:
    options = ServerOptions(host="127.0.0.1", port=0)
    server = GrpcServer(options, HealthService(readiness).methods())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff")
    await server.stop(0)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watcher_hears_of_each_change(
    stub: health_pb2_grpc.HealthStub, readiness: Readiness
) -> None:
    call = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await call.read()).status == Status.NOT_SERVING
    readiness.ready = True
    assert (await call.read()).status == Status.SERVING
    call.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="typo"))
    assert (await unknown.read()).status == Status.SERVICE_UNKNOWN
    unknown.cancel()
