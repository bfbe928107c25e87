"""The gRPC health service, with the service names that gateways and kubelets ask for."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from picker.rpc.call import Served, streaming
from picker.rpc.calls import Read, RpcError, Status, Write

LIVENESS = "liveness"
_EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS = ("", "readiness", _EXT_PROC, "inference-extension")
HEALTH_SERVICE = "grpc.health.v1.Health"
DEFAULT_WATCH_SECONDS = 0.2

_Response = health_pb2.HealthCheckResponse


class HealthService(msgspec.Struct, eq=False):
    """Answers `Check`, `List` and `Watch`. One service may be on several servers.

    `is_ready` must be quick. It decides for the names in `READINESS`; `LIVENESS` is always serving.
    A watcher receives a change within `watch_seconds`.
    """

    is_ready: Callable[[], bool]
    watch_seconds: float = DEFAULT_WATCH_SECONDS

    def methods(self) -> Mapping[str, Served]:
        return {
            f"/{HEALTH_SERVICE}/Check": streaming(self.check),
            f"/{HEALTH_SERVICE}/List": streaming(self.list_all),
            f"/{HEALTH_SERVICE}/Watch": streaming(self.watch),
        }

    def status(self, service: str) -> int | None:
        if service == LIVENESS:
            return int(_Response.SERVING)
        if service not in READINESS:
            return None
        return int(_Response.SERVING if self.is_ready() else _Response.NOT_SERVING)

    async def check(self, read: Read, write: Write) -> None:
        service = await _asked_for(read)
        status = self.status(service)
        if status is None:
            raise RpcError(Status.NOT_FOUND, f"no service '{service}'")
        await write(_response(status))

    async def list_all(self, read: Read, write: Write) -> None:
        await _asked_for(read)
        statuses = {name: _Response(status=self.status(name)) for name in (LIVENESS, *READINESS)}
        await write(health_pb2.HealthListResponse(statuses=statuses).SerializeToString())

    async def watch(self, read: Read, write: Write) -> None:
        """Send the status and each change until cancelled; SERVICE_UNKNOWN for a wrong name."""
        service = await _asked_for(read)
        last: int | None = None
        while True:
            status = self.status(service)
            status = int(_Response.SERVICE_UNKNOWN) if status is None else status
            if status != last:
                last = status
                await write(_response(status))
            await asyncio.sleep(self.watch_seconds)


async def _asked_for(read: Read) -> str:
    data = await read()
    if data is None:
        raise RpcError(Status.INVALID_ARGUMENT, "a request without a message")
    try:
        message: Any = health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError as error:
        raise RpcError(Status.INVALID_ARGUMENT, f"not a health request: {error}") from error
    return str(message.service)


def _response(status: int) -> bytes:
    return cast("bytes", _Response(status=status).SerializeToString())
