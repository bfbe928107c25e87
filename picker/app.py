"""The one composition root: options → objects → one task group; signals and drain.

Nothing else in the picker constructs collaborators.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

from picker.admin.pool_metrics import PoolCollector
from picker.admin.request_metrics import RequestMetrics
from picker.admin.server import AdminServer
from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import LoadedConfig, load_config
from picker.datalayer.activity import Activity, WatchedSnapshots
from picker.datalayer.datastore import Datastore
from picker.datalayer.discovery import FileDiscovery
from picker.datalayer.inflight import InflightLoad
from picker.datalayer.reading import Patience
from picker.datalayer.scrape import MIN_TICK_SECONDS, Scraper, ScrapeSettings, polled
from picker.datalayer.sources import describers
from picker.errors import ConfigError, PickerError
from picker.extproc.health import HealthService
from picker.extproc.server import (
    DEFAULT_MAX_MESSAGE_BYTES,
    GrpcServer,
    ServerOptions,
    TlsMaterial,
    TlsOptions,
    Transport,
    build_health_server,
    build_server,
)
from picker.metrics import PickerMetrics
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings
from picker.requestcontrol.director import Director, RequestPipeline
from picker.requestcontrol.parsing import ParserTable

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.5  # no request for so long while draining: the proxies know
DRAIN_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides. Ports: 0 takes a free one."""

    config_file: Path | None = None
    config_text: str | None = None
    endpoints_file: Path | None = None
    pool_name: str = "default"
    bind_address: str = "0.0.0.0"
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    metrics_bind_address: str = "127.0.0.1"
    metrics_port: int = 9090
    refresh_metrics_interval_seconds: float = 0.05
    metrics_staleness_threshold_seconds: float = 2.0
    drain_timeout_seconds: float = 30.0
    secure_serving: bool = False
    cert_path: Path | None = None
    grpc_max_recv_msg_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    health_checking: bool = False
    grpc_transport: Transport = Transport.H2


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a started picker listens."""

    grpc: int
    health: int
    metrics: int


class StartError(PickerError):
    """A picker that cannot start although its configuration is fine."""


class Picker:
    """A composed picker. Owns every collaborator and the state of the drain."""

    def __init__(self, options: Options) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options = options
        self._draining = False
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics = PickerMetrics()
        config = read_config(options)
        self._assembly = build(config, builtin_plugins(), self._metrics, time.perf_counter)
        self._inflight = InflightLoad()
        self._datastore = Datastore(
            self._assembly.observers, describers(self._assembly.data_layer.bindings)
        )
        self._requests = RequestMetrics(self._metrics)
        self._metrics.register(PoolCollector(options.pool_name, self._datastore, self._inflight))
        self._metrics.info.labels("", version("pointsman")).set(1)
        self._discovery, self._follows_file = self._file_discovery()
        self._activity = Activity(self._inflight)
        self._scraper = self._data_layer()
        self._server, self._health_server = self._grpc_servers()
        self._admin = AdminServer(self._metrics, self._datastore, self._inflight, self.is_ready)

    def is_ready(self) -> bool:
        """Whether new requests should come here: endpoints are known and no drain has begun."""
        return self._datastore.synced and not self._draining

    def stop(self) -> None:
        """Begin the drain; a second call ends it at once."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, announce: Callable[[Ports], None]) -> None:
        """Serve until `stop`, then drain. `announce` is called once all ports are open.

        Raises `ConfigError` for an unusable endpoints file and `StartError` for a busy port.
        """
        for warning in self._assembly.warnings:
            log.warning("configuration: %s", warning)
        self._discovery.load()
        async with AsyncExitStack() as stack:
            ports = await self._listen(stack)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._scraper.run(), name="scraper")]
                if self._follows_file:
                    tasks.append(group.create_task(self._discovery.run(), name="discovery"))
                gc.collect()
                gc.freeze()  # what start-up allocated stays; no later collection need look at it
                announce(ports)
                await self._stopped.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()

    async def _listen(self, stack: AsyncExitStack) -> Ports:
        """Open the ports; what is open is closed with `stack`, whatever happens."""
        options = self._options
        stack.push_async_callback(self._admin.stop)
        stack.push_async_callback(self._health_server.stop, 0)
        stack.push_async_callback(self._server.stop, 0)
        return Ports(
            metrics=await _bound(
                self._admin.start(options.metrics_bind_address, options.metrics_port),
                "--metrics-port",
                f"{options.metrics_bind_address}:{options.metrics_port}",
            ),
            health=await _bound(
                self._health_server.start(),
                "--grpc-health-port",
                f"{options.bind_address}:{options.grpc_health_port}",
            ),
            grpc=await _bound(
                self._server.start(), "--grpc-port", f"{options.bind_address}:{options.grpc_port}"
            ),
        )

    async def _drain(self) -> None:
        """Say "not serving", but serve on until proxies have stopped sending or time is up.

        A proxy needs a moment to notice, and a request refused in that moment is an error to its
        client.
        """
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.drain_timeout_seconds
        log.info("draining: %d requests under way", self._inflight.total)
        quiet_since, seen = loop.time(), self._requests.decisions
        while not self._hurried.is_set() and loop.time() < deadline:
            if self._inflight.total or self._requests.decisions != seen:
                quiet_since, seen = loop.time(), self._requests.decisions
            if loop.time() - quiet_since >= QUIET_SECONDS:
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        grace = 0.0 if self._hurried.is_set() else max(0.0, deadline - loop.time())
        await self._server.stop(grace)

    def _file_discovery(self) -> tuple[FileDiscovery, bool]:
        """The discovery, and whether it follows changes of its file."""
        path, configured = self._options.endpoints_file, self._assembly.data_layer.discovery
        if path is not None and configured is not None:
            raise ConfigError(
                "endpoints come from --endpoints-file or from dataLayer.discovery, not both"
            )
        if path is not None:
            return FileDiscovery(path, self._datastore, self._metrics), True
        if configured is not None and isinstance(configured.plugin, FileDiscoverySettings):
            path = Path(configured.plugin.path)
            return FileDiscovery(path, self._datastore, self._metrics), configured.plugin.watch_file
        raise ConfigError("no endpoints: give --endpoints-file FILE")

    def _data_layer(self) -> Scraper:
        options = self._options
        settings = ScrapeSettings(
            tick_seconds=max(MIN_TICK_SECONDS, options.refresh_metrics_interval_seconds),
            patience=Patience(seconds=options.metrics_staleness_threshold_seconds),
        )
        return Scraper(
            self._datastore,
            polled(self._assembly.data_layer.bindings),
            self._metrics,
            settings,
            Random(),
            self._activity,
        )

    def _grpc_servers(self) -> tuple[GrpcServer, GrpcServer]:
        """The ext_proc server and the health server."""
        options, assembly = self._options, self._assembly
        pipeline = RequestPipeline(
            ParserTable(assembly.parsers), assembly.scheduler, assembly.producers, assembly.hooks
        )
        director = Director(
            pipeline,
            WatchedSnapshots(self._datastore, self._activity),
            inflight=self._inflight,
            rng=Random(),
            observer=self._requests,
        )
        health = HealthService(self.is_ready)
        ext_proc = ServerOptions(
            host=options.bind_address,
            port=options.grpc_port,
            tls=_tls(options),
            max_message_bytes=options.grpc_max_recv_msg_bytes,
            transport=options.grpc_transport,
        )
        server = build_server(
            director, options=ext_proc, health=health if options.health_checking else None
        )
        plain = ServerOptions(
            host=options.bind_address,
            port=options.grpc_health_port,
            transport=options.grpc_transport,
        )
        return server, build_health_server(health, options=plain)


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


def read_config(options: Options) -> LoadedConfig:
    """The configuration that the options name, else the built-in one. Raises `ConfigError`."""
    if options.config_file is not None and options.config_text is not None:
        raise ConfigError("--config-file and --config-text exclude each other")
    if options.config_text is not None:
        return load_config(options.config_text.encode(), "--config-text")
    if options.config_file is None:
        return default_config()
    return load_config(_read(options.config_file, "--config-file"), str(options.config_file))


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror or error}") from error


def _tls(options: Options) -> TlsOptions | None:
    if not options.secure_serving:
        return None
    if options.cert_path is None:
        raise ConfigError("--secure-serving needs --cert-path, a folder with tls.crt and tls.key")
    return TlsOptions(
        TlsMaterial(
            private_key=_read(options.cert_path / "tls.key", "--cert-path"),
            certificate_chain=_read(options.cert_path / "tls.crt", "--cert-path"),
        )
    )


async def _bound(start: Coroutine[None, None, int], flag: str, address: str) -> int:
    try:
        return await start
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE or "in use" in str(error).lower()
        reason = "the port is already in use" if busy else (error.strerror or str(error))
        raise StartError(f"cannot listen on {address} ({flag}): {reason}") from error
