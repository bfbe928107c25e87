"""The table of gRPC methods that a port serves; every transport serves the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from picker.extproc.health import HealthService
from picker.extproc.pump import ExchangeSource, StreamFailedError, serve_stream
from picker.extproc.request_phase import Limits
from picker.extproc.stream_metrics import StreamMetrics
from picker.extproc.wire import METHOD
from picker.rpc import Method, Read, RpcError, Status, Write

# Made by the server, which says whether it is ending calls because it stops.
MethodTable: TypeAlias = Callable[[Callable[[], bool]], Mapping[str, Method]]


def methods(
    exchanges: ExchangeSource | None,
    health: HealthService | None,
    *,
    limits: Limits,
    is_stopping: Callable[[], bool],
    streams: StreamMetrics | None = None,
) -> Mapping[str, Method]:
    """Paths to methods: ext_proc when there are `exchanges`, health when there is `health`.

    `streams` counts those of ext_proc.
    """
    table: dict[str, Method] = {}
    if health is not None:
        table |= health.methods()
    if exchanges is not None:
        process = _process(exchanges, limits, is_stopping)
        table[METHOD] = process if streams is None else streams.counted(process)
    return table


def _process(exchanges: ExchangeSource, limits: Limits, is_stopping: Callable[[], bool]) -> Method:
    async def process(read: Read, write: Write) -> None:
        try:
            await serve_stream(read, write, exchanges, limits=limits, is_stopping=is_stopping)
        except StreamFailedError as failure:
            status = Status.INVALID_ARGUMENT if failure.peer_at_fault else Status.INTERNAL
            raise RpcError(status, str(failure)) from failure

    return process
