"""The one composition root: options → objects → one task group; signals and drain.

Nothing else in the picker constructs collaborators, but for the parts that it is put together of
(`picker.running`) and for the picker of several processes (`picker.processes`).
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
from picker.config.findings import Finding
from picker.config.load import LoadedConfig
from picker.config.watch import ConfigWatch
from picker.datalayer.inflight import InflightLoad
from picker.extproc.health import HealthService
from picker.extproc.stream_metrics import StreamMetrics
from picker.metrics import PickerMetrics
from picker.processes.supervisor import Supervisor
from picker.running.admin_source import ProcessAdmin
from picker.running.config_status import ConfigStatus, problem_of
from picker.running.draining import until_quiet
from picker.running.leader_side import LeaderSide
from picker.running.listeners import Listeners, StartError
from picker.running.metrics_auth import MetricsAuthSide
from picker.running.options import Options, Ports
from picker.running.peer_side import PeerSide
from picker.running.pool_side import PoolSide
from picker.running.recording_side import RecordingSide
from picker.running.request_side import (
    KnownPool,
    RequestSide,
    config_in_use,
    read_config,
    speaking_to_others,
)
from picker.running.xds_side import XdsSide

log = logging.getLogger(__name__)

REFUSING_SECONDS = 0.5  # for those to be answered who still wait when the drain is over

__all__ = ["Options", "Picker", "Ports", "StartError", "read_config", "serve"]


class Picker:
    """A composed picker. Owns every collaborator and the state of the drain."""

    def __init__(self, options: Options) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options = options
        self._draining = False
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics, self._inflight = PickerMetrics(), InflightLoad()
        outside = speaking_to_others(options)
        loaded, content = read_config(options)
        self._config = config_in_use(options, loaded, outside, self._metrics)
        self._watch = self._config_watch(content)
        self._recording = RecordingSide(options, self._config.hash_seed, self._metrics)
        self._leader = LeaderSide(options, loaded.config, self._metrics)
        self._pool = PoolSide(
            options, self._config.assembly, self._metrics, self._inflight, (self._recording,)
        )
        datastore = self._pool.datastore
        self._recording.follow(datastore)
        self._xds = XdsSide(options, datastore, self._metrics)
        self._requests = RequestSide(
            options,
            self._config,
            outside,
            self._metrics,
            self._inflight,
            KnownPool(datastore, self._pool.snapshots, self._pool.rules),
        )
        self._requests.record(self._recording, self._config.assembly)
        self._metrics.info.labels("", version("pointsman")).set(1)
        self._admin = AdminServer(
            self._metrics,
            datastore,
            self._inflight,
            self.is_ready,
            source=ProcessAdmin(
                self._requests,
                ConfigStatus(self._config, problem_of(self._watch)),
                lambda: self._leader.problem() or self._pool.problem(),
            ),
        )
        self._metrics_auth = MetricsAuthSide(options)
        self._listeners = Listeners(
            options,
            self._requests.director,
            HealthService(self.is_ready),
            self._admin,
            StreamMetrics(self._metrics, time.monotonic),
        )
        self._config.subscribe(self._pool.use)
        self._config.subscribe(self._requests.use)
        self._peers = PeerSide(options, self._config, datastore, self._inflight, self._metrics)

    def is_ready(self) -> bool:
        """Whether new requests should come here: endpoints are known, no drain has begun, and no
        other replica leads.
        """
        is_able = self._pool.datastore.synced and not self._draining
        return is_able and self._leader.is_leader()

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, announce: Callable[[Ports], None]) -> None:
        """Serve until `stop`, then drain. `announce` is called once all ports are open.

        Raises `ConfigError` for an unusable endpoints file and `StartError` for a busy port.
        """
        for warning in self._config.assembly.warnings:
            log.warning("configuration: %s", warning)
        self._pool.load()
        self._leader.load()
        async with AsyncExitStack() as stack:
            await self._requests.open(stack)
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
                await self._requests.flush()
                await self._recording.close()

    def _start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin everything that goes on beside the requests until the end."""
        tasks = [*self._pool.start(group, self._leader.may_follow), *self._requests.start(group)]
        tasks += [*self._recording.start(group), *self._xds.start(group)]
        tasks += self._peers.start(group)
        tasks.append(group.create_task(self._admin.watch(), name="history"))
        if self._watch is not None:
            tasks.append(group.create_task(self._watch.run(), name="configuration"))
        if self._listeners.follows_certificates:
            following = self._listeners.follow_certificates()
            tasks.append(group.create_task(following, name="certificates"))
        return tasks

    async def _drain(self) -> None:
        """Say "not serving", but serve on until proxies have stopped sending or time is up."""
        self._draining = True
        self._leader.resign()
        under_way, waiting = self._inflight.own_total, self._requests.waiting
        log.info("draining: %d requests under way, %d waiting", under_way, waiting)
        grace = await until_quiet(
            lambda: self._inflight.own_total + self._requests.waiting,
            lambda: self._requests.decisions,
            self._hurried,
            self._options.drain_timeout_seconds,
        )
        if self._requests.refuse_waiting():
            grace = max(grace, REFUSING_SECONDS)
        await self._listeners.close_ext_proc(grace)

    def _config_watch(self, content: bytes | None) -> ConfigWatch | None:
        path = self._options.config_file
        if path is None or content is None or not self._options.watch_config:
            return None
        return ConfigWatch(path, content, self._apply, self._metrics, time.time)

    async def _apply(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        """Put another configuration to use. Raises `ConfigError`."""
        return self._config.apply(loaded)


async def serve(options: Options, announce: Callable[[Ports], None]) -> None:
    """Run a picker until SIGTERM or SIGINT; a second signal ends the drain at once."""
    picker = Picker(options) if options.processes == 1 else Supervisor(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, picker.stop)
    try:
        await picker.run(announce)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
