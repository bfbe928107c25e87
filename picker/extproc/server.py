"""Builds the servers of the ext_proc and health ports on the transport that the options name.

Everything a stream does is in `stream`, `wire` and `pump`, which the transports share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from picker.extproc.body_budget import BodyBudget
from picker.extproc.services import Exchanges, ExchangesByMetadata, MethodTable, methods
from picker.rpc.calls import Served
from picker.rpc.health import HealthService
from picker.rpc.options import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_MAX_UNFINISHED_BODY_BYTES,
    GrpcServer,
    ServerOptions,
    TlsMaterial,
    TlsOptions,
    Transport,
)
from picker.rpc.server import H2Server

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "DEFAULT_MAX_UNFINISHED_BODY_BYTES",
    "BodyBudget",
    "Exchanges",
    "ExchangesByMetadata",
    "GrpcServer",
    "ServerOptions",
    "TlsMaterial",
    "TlsOptions",
    "Transport",
    "build_health_server",
    "build_rpc_server",
    "build_server",
]


def build_server(
    exchanges: Exchanges,
    *,
    options: ServerOptions,
    health: HealthService | None = None,
) -> GrpcServer:
    """The ext_proc server; `exchanges` is the director, or those of several pools.

    With `health`, the same port answers it.
    """
    return _build(options, _table(options, health, exchanges))


def build_health_server(health: HealthService, *, options: ServerOptions) -> GrpcServer:
    """A server for the health port alone."""
    return _build(options, _table(options, health, None))


def build_rpc_server(table: Mapping[str, Served], *, options: ServerOptions) -> GrpcServer:
    """A server for any other methods; `table` is what they are by their paths."""
    return _build(options, lambda is_stopping: table)


def _table(
    options: ServerOptions, health: HealthService | None, exchanges: Exchanges | None
) -> MethodTable:
    def table(is_stopping: Callable[[], bool]) -> Mapping[str, Served]:
        return methods(
            exchanges,
            health,
            limits=options.limits,
            is_stopping=is_stopping,
            streams=options.streams,
        )

    return table


def _build(options: ServerOptions, table: MethodTable) -> GrpcServer:
    if options.transport is not Transport.GRPCIO:
        return H2Server(options, table)
    # Loaded on demand: it costs start-up time and memory that the other transport does not need.
    from picker.rpc.grpcio_server import GrpcioServer  # noqa: PLC0415

    return GrpcioServer(options, table)
