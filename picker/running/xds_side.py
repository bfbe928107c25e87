"""What a picker does to tell proxies of its pool's endpoints, if it was asked to."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from picker.datalayer.datastore import Datastore
from picker.extproc.server import ServerOptions, build_rpc_server
from picker.metrics import PickerMetrics
from picker.running.listeners import bound
from picker.running.options import Options
from picker.xds.cache import Cache
from picker.xds.feed import EndpointFeed
from picker.xds.server import EndpointDiscovery


class XdsSide:
    """Owns the port of endpoint discovery and what is told there; without `options.xds` nothing."""

    def __init__(self, options: Options, datastore: Datastore, metrics: PickerMetrics) -> None:
        """Opens nothing."""
        flags = options.xds
        self._feed: EndpointFeed | None = None
        if flags is None:
            return
        cache = Cache()
        self._feed = EndpointFeed(datastore, cache, flags.cluster_name, metrics.xds)
        self._options = ServerOptions(
            host=flags.bind_address, port=flags.port, transport=options.grpc_transport
        )
        methods = EndpointDiscovery(cache, metrics.xds).methods()
        self._server = build_rpc_server(methods, options=self._options)

    async def open(self, stack: AsyncExitStack) -> int | None:
        """Listen until `stack` is closed; the port, None when nobody asked for one.

        Raises `StartError`.
        """
        if self._feed is None:
            return None
        stack.push_async_callback(self._server.stop, 0)
        return await bound(self._server.start(), "--xds-port", self._options.address)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Follow the pool until these are cancelled."""
        if self._feed is None:
            return []
        return [group.create_task(self._feed.run(), name="endpoint discovery")]
