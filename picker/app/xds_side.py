"""What a picker does to tell proxies of its pools' endpoints, if it was asked to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from picker.app.listeners import bound
from picker.cli.options import Options
from picker.extproc.server import ServerOptions, build_rpc_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.xds.cache import Cache
from picker.xds.feed import EndpointFeed
from picker.xds.server import EndpointDiscovery


@dataclass(frozen=True, slots=True)
class ToldPool:
    """A pool that proxies are told of as the cluster `name`, and who counts what it is told."""

    name: str
    datastore: Datastore
    metrics: PickerMetrics


def xds_name(options: Options) -> str:
    """What proxies call the pool of these options; "" where nobody is told of it."""
    return "" if options.xds is None else options.xds.cluster_name


class XdsSide:
    """Owns the port of endpoint discovery and what is told there; without `options.xds` nothing."""

    def __init__(self, options: Options, pools: Iterable[ToldPool], metrics: PickerMetrics) -> None:
        """Opens nothing. `metrics` count what clients do."""
        flags = options.xds
        self._feeds: list[EndpointFeed] = []
        if flags is None:
            return
        told = tuple(pools)
        cache = Cache(one.name for one in told)
        self._feeds = [
            EndpointFeed(one.datastore, cache, one.name, one.metrics.xds) for one in told
        ]
        self._options = ServerOptions(
            host=flags.bind_address, port=flags.port, transport=options.grpc_transport
        )
        methods = EndpointDiscovery(cache, metrics.xds).methods()
        self._server = build_rpc_server(methods, options=self._options)

    async def open(self, stack: AsyncExitStack) -> int | None:
        """Listen until `stack` is closed; the port, None when nobody asked for one.

        Raises `StartError`.
        """
        if not self._feeds:
            return None
        stack.push_async_callback(self._server.stop, 0)
        return await bound(self._server.start(), "--xds-port", self._options.address)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Follow the pools until these are cancelled."""
        return [group.create_task(one.run(), name="endpoint discovery") for one in self._feeds]
