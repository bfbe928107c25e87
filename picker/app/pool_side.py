"""What a picker does to know its pool: discovery, scraping, and the gauges that tell of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random

from picker.admin.remembered import RememberedCollector
from picker.app.kubernetes_side import KubernetesSource
from picker.cli.options import Options
from picker.config.build import Assembly
from picker.config.pool_file import pool_contents
from picker.errors import ConfigError
from picker.framework.interfaces import EndpointObserver
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings
from picker.pool.activity import Activity, WatchedSnapshots
from picker.pool.datastore import Datastore
from picker.pool.endpoints_file import FileDiscovery
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RequestRules
from picker.pool.pool_source import PoolSource
from picker.scrape.reading import StalenessLimits
from picker.scrape.scrape import MIN_TICK_SECONDS, Scraper, ScrapeSettings, polled
from picker.scrape.sources import describers
from picker.telemetry.pool_metrics import PoolCollector


class PoolSide:
    """Owns the datastore, the rules of requests, and what fills both.

    `observers` are told of endpoints that left or restarted, as are those of the configuration.
    """

    def __init__(
        self,
        options: Options,
        assembly: Assembly,
        metrics: PickerMetrics,
        inflight: InflightLoad,
        observers: Iterable[EndpointObserver] = (),
    ) -> None:
        """Raises `ConfigError` when there is not exactly one source of endpoints."""
        self._observers = tuple(observers)
        self.datastore, self.rules = Datastore(), RequestRules()
        self.use(assembly)
        self.activity = Activity(inflight)
        self._source, self._follows_source = self._source_of(options, assembly, metrics)
        self._scraper = Scraper(
            self.datastore,
            polled(assembly.data_layer.bindings),
            metrics,
            _settings(options),
            Random(),
            self.activity,
        )
        gauges = PoolCollector(options.pool_name, self.datastore)
        interval = options.pool_gauges_interval_seconds
        metrics.register(RememberedCollector(gauges, interval, time.monotonic))

    @property
    def snapshots(self) -> WatchedSnapshots:
        """The pool for decisions, each of which counts as activity."""
        return WatchedSnapshots(self.datastore, self.activity)

    def use(self, assembly: Assembly) -> None:
        """Go on with the plugins of another configuration."""
        described = tuple(describers(assembly.data_layer.bindings))
        self.datastore.use((*assembly.observers, *self._observers), described)

    def load(self) -> None:
        """Find out for the first time which endpoints exist. Raises `ConfigError`."""
        self._source.load()

    def problem(self) -> str | None:
        """Why what is known of the pool may be old, in a sentence for people; None: it is not."""
        return self._source.problem()

    def is_absent(self) -> bool:
        """Whether there is known to be no such pool."""
        return self._source.is_absent()

    def start(
        self, group: asyncio.TaskGroup, may_follow: Callable[[], Awaitable[None]]
    ) -> list[asyncio.Task[None]]:
        """Keep up with the pool until these are cancelled, once `may_follow` has returned."""
        tasks = [group.create_task(self._scraper.run(), name="scraper")]
        if self._follows_source:
            tasks.append(group.create_task(self._follow(may_follow), name="discovery"))
        return tasks

    async def _follow(self, may_follow: Callable[[], Awaitable[None]]) -> None:
        await may_follow()
        await self._source.run()

    def _source_of(
        self, options: Options, assembly: Assembly, metrics: PickerMetrics
    ) -> tuple[PoolSource, bool]:
        """Where the pool comes from, and whether its changes are followed."""
        found = _endpoints_file(options, assembly)
        if found is not None:
            path, is_followed, allow_names = found
            read = partial(pool_contents, pool=options.pool_name, allow_names=allow_names)
            return FileDiscovery(path, self.datastore, self.rules, metrics, read), is_followed
        if options.kubernetes is not None:
            return KubernetesSource(options.kubernetes, self.datastore, self.rules, metrics), True
        raise ConfigError(
            "no endpoints: give --endpoints-file FILE, or --pool-name NAME to follow an "
            "InferencePool, or --endpoint-selector SELECTOR to follow Pods without one"
        )


def _endpoints_file(options: Options, assembly: Assembly) -> tuple[Path, bool, bool] | None:
    """The endpoints file, whether its changes are followed, and whether addresses may be names;
    None: there is none.
    """
    path = options.endpoints_file
    configured = assembly.data_layer.discovery
    if path is not None and configured is not None:
        raise ConfigError(
            "endpoints come from --endpoints-file or from dataLayer.discovery, not both"
        )
    if path is not None:
        return path, True, False
    if configured is not None and isinstance(configured.plugin, FileDiscoverySettings):
        if options.kubernetes is not None and options.kubernetes.endpoint_selector:
            raise ConfigError(
                "endpoints come from --endpoint-selector or from dataLayer.discovery, not both"
            )
        settings = configured.plugin
        return Path(settings.path), settings.watch_file, settings.allows_names
    return None


def _settings(options: Options) -> ScrapeSettings:
    return ScrapeSettings(
        tick_seconds=max(MIN_TICK_SECONDS, options.refresh_metrics_interval_seconds),
        patience=StalenessLimits(seconds=options.metrics_staleness_threshold_seconds),
    )
