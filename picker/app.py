"""The one composition root: options → objects → one task group; signals and drain.

Nothing else in the picker constructs collaborators.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from random import Random
from types import MappingProxyType

from picker.admin.pool_metrics import PoolCollector
from picker.admin.remembered import RememberedCollector
from picker.admin.request_metrics import RequestMetrics
from picker.admin.server import AdminServer
from picker.admin.tracing import build_tracing
from picker.config.build import Assembly, BuildOptions, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import LoadedConfig, load_config
from picker.config.watch import ConfigWatch, read_config_file
from picker.datalayer.activity import Activity, WatchedSnapshots
from picker.datalayer.datastore import Datastore, Describe
from picker.datalayer.discovery import FileDiscovery
from picker.datalayer.inflight import InflightLoad
from picker.datalayer.reading import Patience
from picker.datalayer.scrape import MIN_TICK_SECONDS, Scraper, ScrapeSettings, polled
from picker.datalayer.sources import describers
from picker.errors import ConfigError
from picker.extproc.health import HealthService
from picker.framework.services import Services
from picker.metrics import PickerMetrics
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings
from picker.requestcontrol.director import Director, RequestPolicies
from picker.running.flushing import Flushes
from picker.running.in_use import BuildContext, ConfigInUse, pipeline_of
from picker.running.json_client import JsonClient
from picker.running.kv_listening import KvListening
from picker.running.listeners import Listeners, StartError
from picker.running.options import Options, Ports

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.5  # no request for so long while draining: the proxies know
DRAIN_POLL_SECONDS = 0.05
FLUSH_SECONDS = 2.0  # for plugins to hand over what they have gathered, at the end

__all__ = ["Options", "Picker", "Ports", "StartError", "read_config", "serve"]


class Picker:
    """A composed picker. Owns every collaborator and the state of the drain."""

    def __init__(self, options: Options) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options = options
        self._draining = False
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()
        self._metrics = PickerMetrics()
        self._http = JsonClient()
        self._tracing = build_tracing(options.tracing, os.environ)
        loaded, content = read_config(options)
        self._config = ConfigInUse(loaded, self._build_context())
        self._watch = self._config_watch(content)
        self._flushes = Flushes(time.monotonic, time.time)
        self._inflight = InflightLoad()
        assembly = self._config.assembly
        self._datastore = Datastore(assembly.observers, self._describers(assembly))
        self._kv_listening = KvListening(self._datastore)
        self._requests = RequestMetrics(self._metrics)
        self._register_metrics()
        self._discovery, self._follows_file = self._file_discovery()
        self._activity = Activity(self._inflight)
        self._scraper = self._data_layer()
        self._director = self._make_director()
        self._listeners = Listeners(
            options,
            self._director,
            HealthService(self.is_ready),
            AdminServer(self._metrics, self._datastore, self._inflight, self.is_ready),
        )
        self._use(assembly)
        self._config.subscribe(self._use)

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
        for warning in self._config.assembly.warnings:
            log.warning("configuration: %s", warning)
        self._discovery.load()
        async with AsyncExitStack() as stack:
            stack.callback(self._tracing.close)
            await stack.enter_async_context(self._http)
            ports = await self._listeners.open(stack)
            async with asyncio.TaskGroup() as group:
                tasks = self._start(group)
                flushing = group.create_task(self._flushes.run(), name="flushes")
                gc.collect()
                gc.freeze()  # what start-up allocated stays; no later collection need look at it
                announce(ports)
                await self._stopped.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
                self._flushes.stop()
                await asyncio.wait([flushing], timeout=FLUSH_SECONDS)
                flushing.cancel()

    def _start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin everything that goes on beside the requests until the end."""
        tasks = [
            group.create_task(self._scraper.run(), name="scraper"),
            group.create_task(self._kv_listening.run(), name="kv events"),
        ]
        if self._follows_file:
            tasks.append(group.create_task(self._discovery.run(), name="discovery"))
        if self._watch is not None:
            tasks.append(group.create_task(self._watch.run(), name="configuration"))
        if self._listeners.follows_certificates:
            following = self._listeners.follow_certificates()
            tasks.append(group.create_task(following, name="certificates"))
        return tasks

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
        await self._listeners.close_ext_proc(grace)

    # Configuration

    def _build_context(self) -> BuildContext:
        options = BuildOptions(
            services=Services(
                http=self._http,
                environment=MappingProxyType(dict(os.environ)),
                hash_seed=secrets.randbits(64),
            ),
            allow_experimental=self._options.allow_experimental_plugins,
            strict_data_scope=self._options.strict_data_scope,
        )
        return BuildContext(builtin_plugins(), self._metrics, options)

    def _config_watch(self, content: bytes | None) -> ConfigWatch | None:
        path = self._options.config_file
        if path is None or content is None or not self._options.watch_config:
            return None
        return ConfigWatch(path, content, self._config.apply, self._metrics, time.time)

    def _use(self, assembly: Assembly) -> None:
        """Serve new requests with `assembly`."""
        self._datastore.use(assembly.observers, self._describers(assembly))
        self._flushes.use(assembly.flushes)
        self._kv_listening.use({name: one.plugin for name, one in assembly.instances.items()})
        self._director.use(pipeline_of(assembly))

    # Collaborators

    def _register_metrics(self) -> None:
        options = self._options
        pool = PoolCollector(options.pool_name, self._datastore, self._inflight)
        interval = options.pool_gauges_interval_seconds
        self._metrics.register(RememberedCollector(pool, interval, time.monotonic))
        self._metrics.info.labels("", version("pointsman")).set(1)

    def _file_discovery(self) -> tuple[FileDiscovery, bool]:
        """The discovery, and whether it follows changes of its file."""
        path = self._options.endpoints_file
        configured = self._config.assembly.data_layer.discovery
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
            polled(self._config.assembly.data_layer.bindings),
            self._metrics,
            settings,
            Random(),
            self._activity,
        )

    def _make_director(self) -> Director:
        options = self._options
        policies = RequestPolicies(
            tracer=self._tracing.tracer,
            emit_endpoint_scores=options.emit_endpoint_scores,
            ignore_subset_hint=options.disable_endpoint_subset_filter,
        )
        return Director(
            pipeline_of(self._config.assembly),
            WatchedSnapshots(self._datastore, self._activity),
            inflight=self._inflight,
            rng=Random(),
            observer=self._requests,
            policies=policies,
        )

    @staticmethod
    def _describers(assembly: Assembly) -> tuple[Describe, ...]:
        return describers(one.plugin for one in assembly.instances.values())


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


def read_config(options: Options) -> tuple[LoadedConfig, bytes | None]:
    """The configuration that the options name, else the built-in one, and what its file held.

    Raises `ConfigError`.
    """
    if options.config_file is not None and options.config_text is not None:
        raise ConfigError("--config-file and --config-text exclude each other")
    if options.config_text is not None:
        content = options.config_text.encode(errors="surrogatepass")
        return load_config(content, "--config-text"), None
    if options.config_file is None:
        return default_config(), None
    content = read_config_file(options.config_file, "--config-file")
    return load_config(content, str(options.config_file)), content
