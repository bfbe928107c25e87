"""The port of endpoint discovery and its feeds: the part of this shelf that a picker loads."""

from collections.abc import Coroutine, Iterable

from picker.app.shelves import PublishedPool
from picker.cli.options import XdsFlags
from picker.metrics.picker_metrics import XdsSeries
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
from picker.xds.feed import EndpointFeed
from picker.xds.server import EndpointDiscovery
from picker.xds.state.cache import Cache


class EndpointDiscoveryPort:
    """A `DiscoveryPort`. `series` count the actions of clients."""

    def __init__(self, flags: XdsFlags, pools: Iterable[PublishedPool], series: XdsSeries) -> None:
        pools = tuple(pools)
        cache = Cache(pool.name for pool in pools)
        self._feeds = [
            EndpointFeed(pool.datastore, cache, pool.name, pool.series) for pool in pools
        ]
        options = ServerOptions(host=flags.bind_address, port=flags.port)
        self.address = options.address
        self._server = GrpcServer(options, EndpointDiscovery(cache, series).methods())

    async def start(self) -> int:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def works(self) -> list[Coroutine[None, None, None]]:
        return [feed.run() for feed in self._feeds]


build = EndpointDiscoveryPort
