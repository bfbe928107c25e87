"""The ext_proc server: the method `Process` and, where asked for, health on the same port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.pump import ExchangeSource, StreamMetrics, StreamPump
from picker.extproc.wire import METHOD
from picker.rpc.call import Call, Served
from picker.rpc.calls import Metadata, Receiver
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer


@dataclass(frozen=True, slots=True)
class ExchangesByMetadata:
    """The directors of several pools at one port; `choose` says whose a call with this metadata
    is. It must be quick.
    """

    choose: Callable[[Metadata], ExchangeSource]


Exchanges: TypeAlias = ExchangeSource | ExchangesByMetadata


def build_server(
    exchanges: Exchanges,
    *,
    options: ServerOptions,
    health: HealthService | None = None,
    settings: StreamSettings | None = None,
    streams: StreamMetrics | None = None,
) -> GrpcServer:
    """The ext_proc server; `exchanges` is the director, or those of several pools.

    With `health`, the same port answers it. `streams` counts what is served. A buffered body is one
    message. One that the port refused would break the stream, where the limit on bodies gives a
    413; so the latter has to be the smaller. Both count in the budget of `options`.
    """
    settings = replace(settings or StreamSettings(), budget=options.budget)
    table = {METHOD: processing(exchanges, settings, streams)}
    return GrpcServer(options, table if health is None else {**table, **health.methods()})


def processing(
    exchanges: Exchanges, settings: StreamSettings, streams: StreamMetrics | None = None
) -> Served:
    """The method `Process`."""

    def serve(call: Call, metadata: Metadata) -> Receiver:
        chosen = exchanges
        if isinstance(chosen, ExchangesByMetadata):
            chosen = chosen.choose(metadata)
        return StreamPump(call, chosen, settings, streams)

    return serve
