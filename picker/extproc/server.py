"""The ext_proc server: the method `Process` and, if configured, health on the same port."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.pump import ExchangeSource, StreamMetrics, StreamPump
from picker.extproc.wire import METHOD
from picker.rpc.call import Call, Served
from picker.rpc.calls import Metadata, Receiver
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer

# A director, or a quick function that chooses the one of several pools by the metadata of a call.
Exchanges: TypeAlias = ExchangeSource | Callable[[Metadata], ExchangeSource]


def build_server(
    exchanges: Exchanges,
    *,
    options: ServerOptions,
    health: HealthService | None = None,
    settings: StreamSettings | None = None,
    streams: StreamMetrics | None = None,
) -> GrpcServer:
    """Create the server; `exchanges` is the director, or those of several pools.

    With `health`, the same port serves health checks. `streams` counts streams. A buffered body is
    one message. A message beyond the port's limit breaks the stream, but a body beyond its limit is
    a 413; so the latter must be the smaller. Both count in the budget of `options`.
    """
    settings = replace(settings or StreamSettings(), budget=options.budget)
    table = {METHOD: processing(exchanges, settings, streams)}
    return GrpcServer(options, table if health is None else {**table, **health.methods()})


def processing(
    exchanges: Exchanges, settings: StreamSettings, streams: StreamMetrics | None = None
) -> Served:
    def serve(call: Call, metadata: Metadata) -> Receiver:
        source = exchanges(metadata) if callable(exchanges) else exchanges
        return StreamPump(call, source, settings, streams)

    return serve
