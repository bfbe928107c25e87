"""gRPC health checks, as probes and gateways make them."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conformance.wire.stream import channel_to

_TIMEOUT_SECONDS = 5.0


async def health_of(address: str, service: str) -> str:
    """Ask a health port for the state of a service: `SERVING`, `NOT_SERVING`, a gRPC status …"""
    async with channel_to(address) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                asked, timeout=_TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
