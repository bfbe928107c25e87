"""The one composition root: options → objects → one task group; signals and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Final

from picker.admin.answers import Turns
from picker.admin.routes import PoolPages
from picker.admin.server import AdminServer, SeveralPools
from picker.app.cluster import Leadership, protect
from picker.app.in_use import Outbound
from picker.app.json_client import JsonClient
from picker.app.listeners import Listeners, OwnPort, StartError
from picker.app.model_choice import KnownModels, ModelChoice, PoolOfModels
from picker.app.pool_choice import PoolChoice
from picker.app.served_pool import ServedPool
from picker.cli.options import Options, Ports
from picker.cli.pools import split
from picker.extproc.server import Exchanges
from picker.metrics.label_caps import PageRoom
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.health import HealthService
from picker.telemetry.spans import build_tracing

log = logging.getLogger(__name__)

QUIET_SECONDS: Final = 0.5  # without a request while draining: the proxies have stopped
DRAIN_POLL_SECONDS: Final = 0.05
REFUSING_SECONDS: Final = 0.5  # to answer requests that still wait after the drain
# For pools that cannot be discovered at all: the picker serves without them this long after the
# first pool was discovered.
GRACE_SECONDS: Final = 10.0

__all__ = ["Options", "Picker", "Ports", "StartError", "compose", "serve"]


def compose(options: Options) -> Picker:
    """Build a picker without opening a port. Raises `ConfigError`."""
    room, turns = PageRoom(options.metrics_client_label_bytes), Turns()
    metrics = PickerMetrics(room)
    metrics.info.labels("", version("pointsman")).set(1)
    outbound = Outbound(JsonClient(), build_tracing(options.tracing, os.environ))
    leadership = Leadership(options, metrics)
    parts = split(options)
    pools = {
        part.key: ServedPool(
            part.options, outbound, PickerMetrics(room) if options.pools else metrics, leadership
        )
        for part in parts
    }
    serving = Serving(pools, leadership, time.monotonic)
    pages = {key: PoolPages(pool, turns=turns) for key, pool in pools.items()}
    own: list[OwnPort] = []
    exchanges: Exchanges = next(iter(pools.values())).director
    if options.pools:
        ready = {key: serving.of_pool(pool) for key, pool in pools.items()}
        several = {key: (one, ready[key]) for key, one in pages.items()}
        admin = SeveralPools(several, metrics, serving.is_ready, turns).server()
        directors = {name: pools[part.key].director for part in parts for name in part.names}
        unnamed = _by_model(pools, metrics, options) if options.route_by_model else None
        choice = PoolChoice(directors, tuple(pools), metrics.unknown_pool_total, unnamed)
        exchanges = choice.choose
        for flags, (key, pool) in zip(options.pools, pools.items(), strict=True):
            if flags.grpc_port is not None:
                health = HealthService(ready[key])
                own.append(OwnPort(key, flags.grpc_port, pool.director, health))
    else:
        admin = AdminServer.of_one(next(iter(pages.values())), serving.is_ready)
    health = HealthService(serving.is_ready)
    every = tuple(pools.values())
    listeners = Listeners(options, exchanges, health, admin, every, metrics, own)
    return Picker(options, outbound, serving, admin, listeners)


def _by_model(
    pools: Mapping[str, ServedPool], metrics: PickerMetrics, options: Options
) -> ModelChoice:
    every = [
        PoolOfModels(
            key,
            pool.director,
            pool.datastore.snapshot,
            lambda pool=pool: pool.known.rules.current,  # type: ignore[misc]
        )
        for key, pool in pools.items()
    ]
    models, unknown = KnownModels(every, time.monotonic), metrics.unknown_model_total
    return ModelChoice(models, unknown, options.model_header_only)


class Serving:
    """The readiness of the process and of each of its pools (a single pool has an empty key)."""

    def __init__(
        self, pools: Mapping[str, ServedPool], leadership: Leadership, clock: Callable[[], float]
    ) -> None:
        self.pools, self.leadership = dict(pools), leadership
        self.is_draining = False
        self._clock = clock
        self._grace_until: float | None = None  # None: no pool is known yet
        self._has_begun = False  # readiness was reported once
        for pool in self.pools.values():
            pool.datastore.watch(self._look)

    def is_ready(self) -> bool:
        return self._serves() and self.is_known()

    def of_pool(self, pool: ServedPool) -> Callable[[], bool]:
        return lambda: self._serves() and pool.is_known()

    def is_known(self) -> bool:
        """True once the endpoints of all pools are known; after the grace period, of any pool."""
        if not any(pool.is_known() for pool in self.pools.values()):
            return False
        if all(pool.is_known() or pool.known.is_absent() for pool in self.pools.values()):
            self._has_begun = True
        is_over = self._grace_until is not None and self._clock() >= self._grace_until
        self._has_begun = self._has_begun or is_over
        return self._has_begun

    def _serves(self) -> bool:
        return not self.is_draining and self.leadership.is_leader()

    def _look(self) -> None:
        # The grace begins with the first known pool, not at the start: a replica may have to lead
        # before it may follow any pool.
        if self._grace_until is None and any(pool.is_known() for pool in self.pools.values()):
            self._grace_until = self._clock() + GRACE_SECONDS


class Picker:
    """A composed picker. Owns its task group and the drain."""

    def __init__(
        self,
        options: Options,
        outbound: Outbound,
        serving: Serving,
        admin: AdminServer,
        listeners: Listeners,
    ) -> None:
        self.pools = serving.pools
        self._options, self._outbound = options, outbound
        self.serving, self._admin, self._listeners = serving, admin, listeners
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, announce: Callable[[Ports], None]) -> None:
        """Serve until `stop`, then drain; `announce` the open ports. Raises `ConfigError` for an
        unusable endpoints file and `StartError` for a busy port.
        """
        leadership = self.serving.leadership
        for key, pool in self.pools.items():
            for warning in pool.config.assembly.warnings:
                log.warning("configuration%s: %s", f" of pool {key}" if key else "", warning)
            pool.load()
        leadership.load()
        async with AsyncExitStack() as stack:
            await self._outbound.open(stack)
            await protect(self._admin, self._options, stack)
            ports = await self._listeners.open(stack)
            async with asyncio.TaskGroup() as group:
                tasks = [task for pool in self.pools.values() for task in pool.start(group)]
                works = self._listeners.works()
                tasks += [group.create_task(work, name=name) for name, work in works]
                leadership.start(group)
                gc.collect()
                gc.freeze()  # what start-up allocated stays; no later collection need look at it
                announce(ports)
                await self._stopped.wait()
                await self._drain()
                # Only after the drain: requests under way need scrapes, peers and discovery.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    async def _drain(self) -> None:
        """Report "not serving", but keep serving until proxies stop sending or time is up."""
        self.serving.is_draining = True
        # At once, so that a standby becomes ready while requests end here.
        self.serving.leadership.resign()
        pools = self.pools.values()
        waiting = sum(pool.waiting for pool in pools)
        under_way = sum(pool.inflight.own_total for pool in pools)
        log.info("draining: %d requests under way, %d waiting", under_way, waiting)
        grace = await self._until_quiet()
        if sum(pool.refuse_waiting() for pool in pools):  # by all of them, also behind the first
            grace = max(grace, REFUSING_SECONDS)
        await self._listeners.close_ext_proc(grace)

    async def _until_quiet(self) -> float:
        """Wait until nothing has been under way or decided for a while; return the seconds left. A
        proxy needs a moment to notice that a picker is no longer ready, and a request refused in
        that moment is an error to its client.
        """
        pools, loop = self.pools.values(), asyncio.get_running_loop()
        deadline = loop.time() + self._options.drain_timeout_seconds
        quiet_since, seen = loop.time(), -1
        while not self._hurried.is_set() and loop.time() < deadline:
            decided = sum(pool.num_decisions for pool in pools)
            if decided != seen or any(pool.unfinished for pool in pools):
                quiet_since, seen = loop.time(), decided
            if loop.time() - quiet_since >= QUIET_SECONDS:
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return 0.0 if self._hurried.is_set() else max(0.0, deadline - loop.time())


async def serve(options: Options, announce: Callable[[Ports], None]) -> None:
    """Run a picker until SIGTERM or SIGINT; a second signal ends the drain at once."""
    picker = compose(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, picker.stop)
    try:
        await picker.run(announce)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
