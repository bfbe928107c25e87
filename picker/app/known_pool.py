"""The endpoints of one pool and the rules of its requests, updated from one source."""

import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random

from picker.admin.metrics_page import RememberedCollector
from picker.app.cluster import ClusterAccess, target_of
from picker.app.peering import Work
from picker.cli.options import Options
from picker.config.build import Assembly
from picker.config.pool_file import pool_contents
from picker.errors import ConfigError
from picker.framework.interfaces import EndpointObserver
from picker.k8s.discovery import KubernetesDiscovery
from picker.metrics.picker_metrics import PickerMetrics
from picker.plugins.discoveries import FileDiscoverySettings
from picker.pool.activity import Activity
from picker.pool.datastore import Datastore
from picker.pool.endpoints_file import FileDiscovery
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RequestRules
from picker.pool.pool_source import PoolSource
from picker.scrape.reading import StalenessLimits
from picker.scrape.scrape import MIN_TICK_SECONDS, Scraper, ScrapeSettings, polled
from picker.scrape.sources import describers
from picker.telemetry.pool_metrics import PoolCollector


class KnownPool:
    """Owns the datastore, the rules of requests, the source of both, and the scraper."""

    def __init__(
        self,
        options: Options,
        assembly: Assembly,
        metrics: PickerMetrics,
        inflight: InflightLoad,
        observers: Iterable[EndpointObserver] = (),
    ) -> None:
        """Prepare the pool. Raise `ConfigError` unless there is exactly one source of endpoints."""
        self._observers = tuple(observers)
        self.datastore, self.rules = Datastore(), RequestRules()
        self.use(assembly)
        self.snapshots = Activity(self.datastore, inflight)
        self._access: ClusterAccess | None = None
        self._source = self._source_of(options, assembly, metrics)
        self._scraper = Scraper(
            self.datastore,
            polled(assembly.data_layer.bindings),
            metrics,
            ScrapeSettings(
                tick_seconds=max(MIN_TICK_SECONDS, options.refresh_metrics_interval_seconds),
                patience=StalenessLimits(seconds=options.metrics_staleness_threshold_seconds),
            ),
            Random(),
            self.snapshots,
        )
        gauges = PoolCollector(options.pool_name, self.datastore)
        interval = options.pool_gauges_interval_seconds
        # Cached: they are sums over all endpoints, and several scrapers may ask at once.
        metrics.register(RememberedCollector(gauges, interval, time.monotonic))

    def use(self, assembly: Assembly) -> None:
        described = tuple(describers(assembly.data_layer.bindings))
        self.datastore.use((*assembly.observers, *self._observers), described)

    def load(self) -> None:
        if self._access is not None:
            self._access.load()
        self._source.load()

    def problem(self) -> str | None:
        """Return why the endpoints may be out of date; None if they are current."""
        return self._source.problem()

    def is_absent(self) -> bool:
        return self._source.is_absent()

    def works(self, may_follow: Callable[[], Awaitable[None]]) -> dict[str, Work]:
        """Return the tasks that follow the pool; discovery starts once `may_follow` returns."""

        async def follow() -> None:
            await may_follow()
            await self._source.run()

        return {"scraper": self._scraper.run, "discovery": follow}

    def _source_of(
        self, options: Options, assembly: Assembly, metrics: PickerMetrics
    ) -> PoolSource:
        found = _endpoints_file(options, assembly)
        if found is not None:
            path, follows, routes_to_names = found
            read = partial(pool_contents, pool=options.pool_name)
            # Envoy resolves names itself if the proxy routes to them.
            resolve = None if routes_to_names else addresses_of
            known = (self.datastore, self.rules, metrics)
            return FileDiscovery(path, *known, read, resolve, follows=follows)
        flags = options.kubernetes
        if flags is None:
            raise ConfigError(
                "no endpoints: give --endpoints-file FILE, or --pool-name NAME to follow an "
                "InferencePool, or --endpoint-selector SELECTOR to follow Pods without one"
            )
        self._access = ClusterAccess(flags)
        return KubernetesDiscovery(
            target_of(flags), self._access.open, self.datastore, self.rules, metrics
        )


def _endpoints_file(options: Options, assembly: Assembly) -> tuple[Path, bool, bool] | None:
    """Return the file, whether to watch it, and whether the proxy routes to the names in it."""
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
        return Path(settings.path), settings.watch_file, settings.routes_to_names
    return None


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the sorted IPv4 addresses of a host name, or the IPv6 ones if it has none. Blocks."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    either = [
        sorted({str(address[0]) for family, *_, address in found if family == wanted})
        for wanted in (socket.AF_INET, socket.AF_INET6)
    ]
    return tuple(either[0] or either[1])
