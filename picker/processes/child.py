"""A process that serves ext_proc for a picker of several: its own director, plugins and port.

What it knows of the pool and of the others' load comes out of shared memory, looked at every few
milliseconds beside the requests. Started as `python -m picker.processes SOCKET PARENT`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from picker.app.draining import until_quiet
from picker.app.listeners import ExtProcPort, StartError
from picker.app.logs import set_up_logging
from picker.app.memory import keep_freed_pages
from picker.app.request_side import KnownPool, RequestSide, config_in_use, speaking_to_others
from picker.config.build import Assembly
from picker.config.load import LoadedConfig, load_config
from picker.errors import ConfigError, PickerError
from picker.extproc.stream_metrics import StreamMetrics
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.pool.request_rules import RequestRules
from picker.processes.answers import answer
from picker.processes.messages import (
    Answered,
    Ask,
    Channel,
    Commit,
    Configuration,
    Drain,
    Failed,
    Follow,
    Prepare,
    Prepared,
    Ready,
    Start,
    Tell,
    Told,
)
from picker.processes.parentage import die_with
from picker.rpc.health import HealthService
from picker.sharing.block import BlockReader, BlockWriter
from picker.sharing.load import LoadReader, LoadWriter
from picker.sharing.pace import Pace
from picker.sharing.pool import PoolReader
from picker.sharing.totals import numbers_of

log = logging.getLogger(__name__)

SHARE_SECONDS = 0.01  # between two looks at what the others say


class ServingProcess:
    """Owns every collaborator of a process that serves, and the state of its drain."""

    def __init__(self, start: Start, channel: Channel) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        options = start.options
        self._channel = channel
        self._drain_timeout_seconds = options.drain_timeout_seconds
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics, self._inflight = PickerMetrics(), InflightLoad()
        outside = self._outside = speaking_to_others(options)
        self._revision = start.configuration.revision
        self._prepared: tuple[Assembly, int] | None = None
        self._config = config_in_use(options, _loaded(start.configuration), outside, self._metrics)
        self._datastore = Datastore(self._config.assembly.observers)
        self._rules = RequestRules()
        self._requests = RequestSide(
            options,
            self._config,
            outside,
            self._metrics,
            self._inflight,
            KnownPool(self._datastore, self._datastore, self._rules),
        )
        self._rules.use(start.rules)
        self._port = ExtProcPort(
            options,
            self._requests.director,
            HealthService(self.is_ready),
            socket.socket(fileno=start.listening),
            StreamMetrics(self._metrics, time.monotonic),
            start.certificate,
        )
        self._pool = PoolReader(BlockReader(start.pool), self._datastore)
        own, others = start.loads[start.index], [*start.loads]
        del others[start.index]
        self._own_load = LoadWriter(BlockWriter(own), self._inflight, self._decisions)
        self._other_loads = LoadReader([BlockReader(fd) for fd in others])
        self._config.subscribe(self._use)

    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        return self._datastore.synced and not self._stopped.is_set()

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self) -> None:
        """Serve until `stop` or until the parent is gone, then drain. Raises `StartError`."""
        async with AsyncExitStack() as stack:
            await self._outside.open(stack)
            if not self._pool.poll():  # it was published before this process was started
                raise StartError("the pool cannot be read")
            await self._port.open(stack)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._share(), name="sharing")]
                tasks += self._requests.start(group)
                if self._port.follows_certificates:
                    following = self._port.follow_certificates()
                    tasks.append(group.create_task(following, name="certificates"))
                tasks.append(group.create_task(self._obey(), name="parent"))
                gc.collect()
                gc.freeze()  # what start-up allocated stays; no later collection need look at it
                await self._channel.send(Ready(self._revision))
                await self._stopped.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
                await self._requests.flush()
                await self._say_goodbye()

    async def _drain(self) -> None:
        log.info("draining: %d requests under way", self._inflight.own_total)
        grace = await until_quiet(
            lambda: self._inflight.own_total,
            self._decisions,
            self._hurried,
            self._drain_timeout_seconds,
        )
        closing = asyncio.ensure_future(self._port.close(grace))
        hurrying = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait([closing, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not closing.done():
            await self._port.close(0)
        await closing

    async def _say_goodbye(self) -> None:
        self._own_load.publish()
        try:
            await self._channel.send(Told(None, numbers_of(self._metrics)))
        except ConnectionError:
            log.warning("the process that watches the pool is gone")
        self._channel.close()

    async def _share(self) -> None:
        """Look at what the others say, and say what is under way here, until cancelled."""
        pace = Pace()
        while True:
            now = time.perf_counter()
            if pace.is_due(now) and self._pool.poll():
                pace.spent(now, time.perf_counter())
            if self._other_loads.poll():
                self._inflight.set_others(self._other_loads.counts)
            self._own_load.publish()
            await asyncio.sleep(SHARE_SECONDS)

    def _decisions(self) -> int:
        return self._requests.decisions

    # What the parent says

    async def _obey(self) -> None:
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, Prepare):
                problem = self._prepare(message.configuration)
                await self._channel.send(Prepared(message.question, problem))
            elif isinstance(message, Commit):
                self._commit()
            elif isinstance(message, Follow):
                self._rules.use(message.rules)
            elif isinstance(message, Tell):
                await self._channel.send(Told(message.question, numbers_of(self._metrics)))
            elif isinstance(message, Ask):
                content = answer(self._requests, message.subject, message.argument)
                await self._channel.send(Answered(message.question, content))
            elif isinstance(message, Drain):
                self.stop()
        log.error("the process that watches the pool is gone; ending")
        self._hurried.set()
        self._stopped.set()

    def _prepare(self, configuration: Configuration) -> str | None:
        """Build what is asked for; what is wrong with it, if anything."""
        self._prepared = None
        try:
            assembly = self._config.prepare(_loaded(configuration))
        except ConfigError as error:
            return str(error)
        self._prepared = (assembly, configuration.revision)
        return None

    def _commit(self) -> None:
        if self._prepared is not None:
            assembly, self._revision = self._prepared
            self._prepared = None
            self._config.commit(assembly)

    def _use(self, assembly: Assembly) -> None:
        self._datastore.use(assembly.observers, ())
        self._requests.use(assembly)


def _loaded(configuration: Configuration) -> LoadedConfig:
    return load_config(configuration.content, configuration.name)


async def serve_child(end: socket.socket) -> int:
    """Serve as the parent at the other end of the socket says; the exit status."""
    channel = await Channel.over(end)
    start = await channel.receive()
    if not isinstance(start, Start):
        return 1
    logs = start.options.logs
    set_up_logging(logs.verbosity, as_json=logs.as_json, process=start.index)
    try:
        process = ServingProcess(start, channel)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.stop)
        await process.run()
    except PickerError as error:
        await channel.send(Failed(str(error)))
        channel.close()
        return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Run a child; its arguments are the descriptor of its socket and the parent's process id."""
    end, parent = map(int, argv)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent as well
    keep_freed_pages(os.environ)
    return uvloop.run(serve_child(socket.socket(fileno=end)))
