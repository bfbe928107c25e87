"""The gRPC health service: liveness is that we answer, readiness is what the application says.

Source: `grpc.health.v1`, and the service names that gateways and kubelets ask for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.extproc.wire import SERVICE

LIVENESS = "liveness"
READINESS = ("", "readiness", SERVICE, "inference-extension")
DEFAULT_WATCH_SECONDS = 0.2

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers `Check`, `List` and `Watch`.

    `is_ready` is asked for every answer, so that no copy of it can go stale; it must be quick. It
    decides for the names in `READINESS`; `LIVENESS` is always serving. `Check` of another name is
    NOT_FOUND. A watcher hears of a change within `watch_seconds`.
    """

    def __init__(
        self, is_ready: Callable[[], bool], *, watch_seconds: float = DEFAULT_WATCH_SECONDS
    ) -> None:
        self._is_ready = is_ready
        self._watch_seconds = watch_seconds

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`; one service may be on several."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def status(self, service: str) -> int | None:
        """The serving status of `service`, None for a name nobody serves."""
        if service == LIVENESS:
            return int(_Response.SERVING)
        if service not in READINESS:
            return None
        return int(_Response.SERVING if self._is_ready() else _Response.NOT_SERVING)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """The status now."""
        status = self.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service '{request.service}'")
        return _Response(status=status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        """The status of every service."""
        statuses = {name: _Response(status=self.status(name)) for name in (LIVENESS, *READINESS)}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """The status now and after each change; SERVICE_UNKNOWN for an unknown name."""
        told: int | None = None
        while True:
            status = self.status(request.service)
            status = int(_Response.SERVICE_UNKNOWN) if status is None else status
            if status != told:
                told = status
                yield _Response(status=status)
            await asyncio.sleep(self._watch_seconds)
