"""A picker of several processes: this one watches the pool, its children serve ext_proc.

Theory of operation. Children share nothing on the way of a request. What they have to know of each
other lies in shared memory: the pool as this process knows it, and what each child has under way.
Both are written and looked at every few milliseconds beside the requests. Everything else goes over
one socket to each child: configurations, objectives and rewrites, questions for its metrics, the
end.

Every child listens at the port with a socket of its own, and the system spreads connections over
them; a unix socket is one that all accept from. A child that ends is replaced, and its connections
alone are lost. Its successor begins with the configuration and the pool of that moment.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from picker.admin.pool_face import PoolFace
from picker.admin.server import AdminServer
from picker.app.config_status import ConfigStatus, problem_of
from picker.app.leader_side import LeaderSide
from picker.app.listeners import (
    SidePorts,
    StartError,
    certificate_made_on_the_spot,
    ext_proc_options,
)
from picker.app.pool_side import PoolSide
from picker.app.request_side import config_in_use, read_config, speaking_to_others
from picker.app.xds_side import ToldPool, XdsSide, xds_name
from picker.cli.metrics_auth import MetricsAuthSide
from picker.cli.options import Options, Ports
from picker.config.build import Assembly
from picker.config.findings import Finding
from picker.config.load import LoadedConfig
from picker.config.watch import ConfigWatch
from picker.errors import ConfigError
from picker.framework.interfaces import KvEventConsumer
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.inflight import InflightLoad
from picker.processes.answers import FleetAdmin
from picker.processes.fleet import ServingFleet
from picker.processes.messages import Configuration, Start
from picker.processes.rules import RuleTelling
from picker.processes.serving import Serving
from picker.rpc.binding import bind_shared, bound_port, probe
from picker.rpc.health import HealthService
from picker.rpc.options import Transport
from picker.sharing.block import BlockReader, BlockWriter, create_block
from picker.sharing.load import LOAD_BYTES, LoadReader, publish_nothing
from picker.sharing.pace import Pace
from picker.sharing.pool import POOL_BYTES, Lives, PoolWriter
from picker.sharing.totals import Numbers, Totals

log = logging.getLogger(__name__)

SHARE_SECONDS = 0.01  # between two looks at what the children say
ENDING_SECONDS = 5.0  # for children to end, beyond what their requests may take


class Supervisor:
    """Owns what knows the pool, the memory that is shared, and the children."""

    def __init__(self, options: Options) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options = options
        self._draining = False
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics, self._inflight = PickerMetrics(), InflightLoad()
        _refuse_unshareable(options)
        loaded, content = read_config(options)
        outside = speaking_to_others(replace(options, tracing=False))
        self._config = config_in_use(options, loaded, outside, self._metrics)
        _refuse_what_one_process_does(self._config.assembly)
        self._configuration = Configuration(loaded.content, loaded.source.name, revision=0)
        self._reloading = asyncio.Lock()
        self._watch = self._config_watch(content)
        lives = Lives()
        self._leader = LeaderSide(options, self._metrics)
        self._may_follow = partial(self._leader.may_follow, loaded.config)
        self._pool = PoolSide(
            options, self._config.assembly, self._metrics, self._inflight, (lives,)
        )
        self._config.subscribe(self._pool.use)
        told = [ToldPool(xds_name(options), self._pool.datastore, self._metrics)]
        self._xds = XdsSide(options, told, self._metrics)
        self._metrics.info.labels("", version("pointsman")).set(1)
        self._totals = Totals()
        self._memory = _Memory(options.processes)
        self._pool_writer = PoolWriter(BlockWriter(self._memory.pool), lives)
        self._loads = LoadReader([BlockReader(fd) for fd in self._memory.loads])
        self._fleet = ServingFleet(options.processes, self._begin, self._ended, self._served)
        self._telling = RuleTelling(self._pool.rules, lambda: self._fleet.members)
        datastore = self._pool.datastore
        status = ConfigStatus(self._config, problem_of(self._watch))
        source = FleetAdmin(lambda: self._fleet.members, status, self._problem)
        face = PoolFace(self._metrics, datastore, self._inflight, source, self._page)
        self._admin = AdminServer.of_one(face, self.is_ready)
        self._metrics_auth = MetricsAuthSide(options)
        self._beside = SidePorts(options, HealthService(self.is_ready), self._admin)
        self._certificate = certificate_made_on_the_spot(options.tls)
        self._reserved: socket.socket | None = None

    def is_ready(self) -> bool:
        """Whether new requests should come here: somebody serves, and no drain has begun."""
        is_able = self._pool.datastore.synced and not self._draining
        return is_able and self._leader.is_leader() and bool(self._fleet.members)

    def _problem(self) -> str | None:
        return self._leader.problem() or self._pool.problem()

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, announce: Callable[[Ports], None]) -> None:
        """Serve until `stop`, then drain. `announce` is called once all children serve.

        Raises `ConfigError` for an unusable endpoints file, and `StartError` for a busy port and
        for children that cannot serve.
        """
        for warning in self._config.assembly.warnings:
            log.warning("configuration: %s", warning)
        self._pool.load()
        self._leader.load()
        self._pool_writer.publish(self._pool.datastore.snapshot())
        async with AsyncExitStack() as stack:
            stack.enter_context(self._memory)
            await self._metrics_auth.open(stack, self._admin)
            health, http = await self._beside.open(stack)
            xds = await self._xds.open(stack)
            port = self._reserve(stack)
            problem = await self._serve(lambda: announce(Ports(port, health, http, xds)))
        if problem is not None:
            raise StartError(problem)

    async def _serve(self, announce: Callable[[], None]) -> str | None:
        """Serve from the first start of the children to their end; why they could not start."""
        async with asyncio.TaskGroup() as group:
            tasks = self._start(group)
            self._leader.start(group)
            stopping = group.create_task(self._stopped.wait(), name="signal")
            starting = group.create_task(self._fleet.all_serve(), name="start")
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            problem = starting.result() if starting.done() else None
            if problem is None:
                if starting.done():
                    announce()
                await stopping
                await self._drain()
            self._leader.resign()
            self._fleet.kill()
            for task in (*tasks, starting, stopping):
                task.cancel()
        return problem

    def _start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin the children, and everything that goes on beside them until the end."""
        self._fleet.start(group)
        tasks = [
            *self._pool.start(group, self._may_follow),
            *self._xds.start(group),
            group.create_task(self._share(), name="sharing"),
            group.create_task(self._fleet.watch(), name="watching"),
            group.create_task(self._admin.watch(), name="history"),
            group.create_task(self._telling.run(), name="rules"),
        ]
        following = self._beside.follow_certificates()
        tasks += [group.create_task(one, name="certificates") for one in following]
        if self._watch is not None:
            tasks.append(group.create_task(self._watch.run(), name="configuration"))
        return tasks

    async def _drain(self) -> None:
        """Say "not serving", and let the children serve on until proxies have noticed."""
        self._draining = True
        self._leader.resign()
        log.info("draining: %d requests under way", self._inflight.total)
        await self._fleet.drain()
        waiting = asyncio.ensure_future(
            self._fleet.wait(self._options.drain_timeout_seconds + ENDING_SECONDS)
        )
        hurrying = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait([waiting, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not waiting.done():
            await self._fleet.drain()
            await self._fleet.wait(ENDING_SECONDS)
        waiting.cancel()

    # Children

    def _reserve(self, stack: AsyncExitStack) -> int:
        """Keep the port, without listening at it, for children to come; or have the unix socket.

        Returns the port, 0 for a unix socket. Raises `StartError`.
        """
        wanted = ext_proc_options(self._options)
        try:
            probe(wanted)
            self._reserved = bind_shared(wanted)
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            reason = "the port is already in use" if busy else (error.strerror or str(error))
            text = f"cannot listen on {wanted.address} (--grpc-port): {reason}"
            raise StartError(text) from error
        stack.callback(self._reserved.close)
        if wanted.unix_path is not None:
            stack.callback(wanted.unix_path.unlink, missing_ok=True)
        return bound_port(self._reserved)

    async def _begin(self, index: int) -> Serving:
        """Start a child, with a socket of its own or the one that all accept from."""
        reserved = self._reserved
        if reserved is None:
            raise OSError("the port is not open")
        with ExitStack() as stack:
            listening = reserved
            wanted = ext_proc_options(self._options)
            if wanted.unix_path is None:
                listening = bind_shared(replace(wanted, port=bound_port(reserved)))
                stack.callback(listening.close)
            start = Start(
                index=index,
                options=self._options,
                configuration=self._configuration,
                pool=self._memory.pool,
                loads=self._memory.loads,
                listening=listening.fileno(),
                rules=self._pool.rules.current,
                certificate=self._certificate,
            )
            return await Serving.begin(
                start, (self._memory.pool, *self._memory.loads, listening.fileno())
            )

    def _served(self, serving: Serving) -> None:
        """A child serves; by another configuration than now, if that has changed meanwhile."""
        self._telling.look()
        if serving.revision != self._configuration.revision:
            serving.kill()  # its successor begins with the one that is in use

    def _ended(self, serving: Serving, is_unasked: bool) -> None:
        if is_unasked:
            self._metrics.process_restarts_total.inc()
        if serving.numbers is not None:
            self._totals.add_ended(serving.numbers)
        writer = BlockWriter(self._memory.loads[serving.index])
        publish_nothing(writer)
        writer.close()

    # What is shared

    async def _share(self) -> None:
        """Show the children the pool, and look at what they have under way, until cancelled."""
        decisions, pace = 0, Pace()
        while True:
            now = time.perf_counter()
            if pace.is_due(now) and self._pool_writer.publish(self._pool.datastore.snapshot()):
                pace.spent(now, time.perf_counter())
            if self._loads.poll():
                self._inflight.set_others(self._loads.counts)
                if self._loads.decisions != decisions:
                    decisions = self._loads.decisions
                    self._pool.activity.note()
            await asyncio.sleep(SHARE_SECONDS)

    async def _page(self) -> bytes:
        """The metrics of all processes."""
        told = await asyncio.gather(*(one.tell() for one in self._fleet.members))
        living: list[Numbers] = [numbers for numbers in told if numbers is not None]
        return self._totals.render(self._metrics, living)

    # Configuration

    def _config_watch(self, content: bytes | None) -> ConfigWatch | None:
        path = self._options.config_file
        if path is None or content is None or not self._options.watch_config:
            return None
        return ConfigWatch(path, content, self._apply, self._metrics, time.time)

    async def _apply(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        """Put another configuration to use everywhere, or nowhere. Raises `ConfigError`."""
        async with self._reloading:
            assembly = self._config.prepare(loaded)
            _refuse_what_one_process_does(assembly)
            revision = self._configuration.revision + 1
            wanted = Configuration(loaded.content, loaded.source.name, revision)
            members = self._fleet.members
            problems = await asyncio.gather(*(one.prepare(wanted) for one in members))
            for member, problem in zip(members, problems, strict=True):
                if problem is not None:
                    raise ConfigError(f"serving process {member.index}: {problem}")
            self._configuration = wanted
            await asyncio.gather(*(one.commit(revision) for one in members))
            for one in self._fleet.members:
                self._served(one)  # one may have begun to serve meanwhile
            return self._config.commit(assembly)


class _Memory:
    """Owns the descriptors of what is shared; a context manager that closes them."""

    def __init__(self, processes: int) -> None:
        self.pool = create_block("pointsman-pool", POOL_BYTES)
        self.loads = [
            create_block(f"pointsman-load-{index}", LOAD_BYTES) for index in range(processes)
        ]

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.pool, *self.loads):
            os.close(fd)


def _refuse_unshareable(options: Options) -> None:
    if options.grpc_transport is Transport.GRPCIO:
        raise ConfigError(
            "--processes needs --grpc-transport native or h2: grpcio cannot share its port"
        )
    if not hasattr(socket, "SO_REUSEPORT") and ext_proc_options(options).unix_path is None:
        raise ConfigError("--processes needs a unix socket here: ports cannot be shared")


def _refuse_what_one_process_does(assembly: Assembly) -> None:
    """Raises `ConfigError` for what cannot be spread over processes."""
    if assembly.flow_control is not None:
        raise ConfigError(
            "the gate 'flowControl' needs --processes 1: queues, caps and fairness would hold in"
            " each process for itself"
        )
    for name, one in assembly.instances.items():
        plugin = one.plugin
        if isinstance(plugin, KvEventConsumer) and plugin.kv_event_feed.bind_address is not None:
            raise ConfigError(
                f"plugin '{name}': with --processes engines cannot connect to the picker; have it"
                " connect to them"
            )
