"""The one composition root: options → objects → one task group; signals and drain.

Nothing else in the picker constructs collaborators, but for the parts that it is put together of.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version

from picker.admin.server import AdminServer
from picker.app.draining import until_quiet
from picker.app.leader_side import LeaderSide
from picker.app.listeners import Listeners, OwnPort, StartError
from picker.app.metrics_auth import MetricsAuthSide
from picker.app.peer_side import PeerPortSide
from picker.app.pool_choice import PoolChoice
from picker.app.pool_group import PoolGroup
from picker.app.request_side import speaking_to_others
from picker.app.served_pool import ServedPool
from picker.app.xds_side import ToldPool, XdsSide, xds_name
from picker.cli.options import Options, Ports
from picker.cli.pools import split
from picker.extproc.server import Exchanges, ExchangesByMetadata
from picker.extproc.stream_metrics import StreamMetrics
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.health import HealthService

log = logging.getLogger(__name__)

REFUSING_SECONDS = 0.5  # for those to be answered who still wait when the drain is over

__all__ = ["Options", "Picker", "Ports", "StartError", "serve"]


class Picker:
    """A composed picker. Owns its pools (one alone has an empty key), what they share, and the
    state of the drain.
    """

    def __init__(self, options: Options) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options = options
        self._draining = False
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics = PickerMetrics()
        self._metrics.info.labels("", version("pointsman")).set(1)
        self._outside = speaking_to_others(options)
        self._leader = LeaderSide(options, self._metrics)
        parts = split(options)
        self.pools = {
            part.key: ServedPool(
                part.options,
                self._outside,
                PickerMetrics() if options.pools else self._metrics,
                self._leader,
            )
            for part in parts
        }
        self._group = PoolGroup(self.pools, self._metrics, time.monotonic)
        told = [
            ToldPool(xds_name(part.options), pool.datastore, pool.metrics)
            for part, pool in zip(parts, self.pools.values(), strict=True)
        ]
        self._xds = XdsSide(options, told, self._metrics)
        self._peers = PeerPortSide(options, [pool.peers for pool in self.pools.values()])
        self._admin = self._admin_server()
        self._metrics_auth = MetricsAuthSide(options)
        self._listeners = Listeners(
            options,
            self._exchanges(),
            HealthService(self.is_ready),
            self._admin,
            StreamMetrics(self._metrics, time.monotonic),
            self._own_ports(),
        )

    def is_ready(self) -> bool:
        """Whether new requests should come here: endpoints are known, no drain has begun, and no
        other replica leads.
        """
        return self._serves() and self._group.is_known()

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, announce: Callable[[Ports], None]) -> None:
        """Serve until `stop`, then drain. `announce` is called once all ports are open.

        Raises `ConfigError` for an unusable endpoints file and `StartError` for a busy port.
        """
        self._group.load()
        self._leader.load()
        async with AsyncExitStack() as stack:
            await self._outside.open(stack)
            await self._metrics_auth.open(stack, self._admin)
            ports = await self._listeners.open(stack)
            ports = replace(ports, xds=await self._xds.open(stack))
            ports = replace(ports, peers=await self._peers.open(stack))
            async with asyncio.TaskGroup() as group:
                tasks = self._start(group)
                self._leader.start(group)
                gc.collect()
                gc.freeze()  # what start-up allocated stays; no later collection need look at it
                announce(ports)
                await self._stopped.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
                await self._group.close()

    def _start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin everything that goes on beside the requests until the end."""
        tasks = [*self._group.start(group), *self._xds.start(group)]
        tasks.append(group.create_task(self._admin.watch(), name="history"))
        following = self._listeners.follow_certificates()
        return [*tasks, *(group.create_task(one, name="certificates") for one in following)]

    async def _drain(self) -> None:
        """Say "not serving", but serve on until proxies have stopped sending or time is up."""
        self._draining = True
        self._leader.resign()
        group = self._group
        waiting = group.waiting
        log.info("draining: %d requests under way, %d waiting", group.unfinished - waiting, waiting)
        grace = await until_quiet(
            lambda: group.unfinished,
            lambda: group.decisions,
            self._hurried,
            self._options.drain_timeout_seconds,
        )
        if group.refuse_waiting():
            grace = max(grace, REFUSING_SECONDS)
        await self._listeners.close_ext_proc(grace)

    def _serves(self) -> bool:
        """Whether this process takes requests, whatever is known of a pool."""
        return not self._draining and self._leader.is_leader()

    def _serves_pool(self, pool: ServedPool) -> Callable[[], bool]:
        return lambda: self._serves() and pool.is_known()

    def _exchanges(self) -> Exchanges:
        """Who decides the requests at the common port."""
        if not self._options.pools:
            return next(iter(self.pools.values())).director
        directors = {
            name: self.pools[part.key].director
            for part in split(self._options)
            for name in part.names
        }
        choice = PoolChoice(directors, tuple(self.pools), self._metrics.unknown_pool_total)
        return ExchangesByMetadata(choice.choose)

    def _own_ports(self) -> list[OwnPort]:
        """The ports of those pools that have one."""
        found = []
        for flags, (key, pool) in zip(self._options.pools, self.pools.items(), strict=False):
            if flags.grpc_port is not None:
                health = HealthService(self._serves_pool(pool))
                found.append(OwnPort(key, flags.grpc_port, pool.director, health))
        return found

    def _admin_server(self) -> AdminServer:
        if not self._options.pools:
            return AdminServer.of_one(next(iter(self.pools.values())).face, self.is_ready)
        ready = {key: self._serves_pool(pool) for key, pool in self.pools.items()}
        return self._group.admin(ready, self.is_ready)


async def serve(options: Options, announce: Callable[[Ports], None]) -> None:
    """Run a picker until SIGTERM or SIGINT; a second signal ends the drain at once."""
    picker = Picker(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, picker.stop)
    try:
        await picker.run(announce)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
