"""The table of gRPC methods that a port serves; every transport serves the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from picker.extproc.pump import ExchangeSource, StreamFailedError, serve_stream
from picker.extproc.request_phase import Limits
from picker.extproc.stream_metrics import StreamMetrics
from picker.extproc.wire import METHOD
from picker.rpc.calls import ByMetadata, Metadata, Method, Read, RpcError, Served, Status, Write
from picker.rpc.health import HealthService

# Made by the server, which says whether it is ending calls because it stops.
MethodTable: TypeAlias = Callable[[Callable[[], bool]], Mapping[str, Served]]


@dataclass(frozen=True, slots=True)
class ExchangesByMetadata:
    """The directors of several pools at one port; `choose` says whose a call with this metadata
    is, and answers with one of a few sources, which live as long as the port.
    """

    choose: Callable[[Metadata], ExchangeSource]


Exchanges: TypeAlias = ExchangeSource | ExchangesByMetadata


def methods(
    exchanges: Exchanges | None,
    health: HealthService | None,
    *,
    limits: Limits,
    is_stopping: Callable[[], bool],
    streams: StreamMetrics | None = None,
) -> Mapping[str, Served]:
    """Paths to methods: ext_proc when there are `exchanges`, health when there is `health`.

    `streams` counts those of ext_proc.
    """
    table: dict[str, Served] = {}
    if health is not None:
        table |= health.methods()
    if exchanges is not None:

        def serving(source: ExchangeSource) -> Method:
            process = _process(source, limits, is_stopping)
            return process if streams is None else streams.counted(process)

        table[METHOD] = _served(exchanges, serving)
    return table


def _served(exchanges: Exchanges, serving: Callable[[ExchangeSource], Method]) -> Served:
    if not isinstance(exchanges, ExchangesByMetadata):
        return serving(exchanges)
    made: dict[int, Method] = {}  # by the identity of the source

    def choose(metadata: Metadata) -> Method:
        source = exchanges.choose(metadata)
        method = made.get(id(source))
        if method is None:
            method = made[id(source)] = serving(source)
        return method

    return ByMetadata(choose)


def _process(exchanges: ExchangeSource, limits: Limits, is_stopping: Callable[[], bool]) -> Method:
    async def process(read: Read, write: Write) -> None:
        try:
            await serve_stream(read, write, exchanges, limits=limits, is_stopping=is_stopping)
        except StreamFailedError as failure:
            status = Status.INVALID_ARGUMENT if failure.peer_at_fault else Status.INTERNAL
            raise RpcError(status, str(failure)) from failure

    return process
