"""The exchange of one pool's state with the other replicas."""

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeAlias

from picker.app.cluster import ClusterAccess
from picker.app.in_use import ConfigInUse
from picker.cli.options import Options, PeerFlags
from picker.config.build import Assembly
from picker.errors import ConfigError
from picker.framework.replicas import SharesLoads
from picker.k8s.service_addresses import follow_service, of_service
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.credentials import PeerCredentials
from picker.peers.discovery import NamedPeers, peer_addresses
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.mesh import Mesh
from picker.peers.server import PoolReports
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad

# A task that runs until cancelled.
Work: TypeAlias = Callable[[], Coroutine[None, None, None]]
INTERVAL_SECONDS = 0.05  # between two messages to a peer, at least


class Peering:
    """Owns the exchange of one pool's state with other replicas, and the connections to them."""

    def __init__(
        self,
        options: Options,
        flags: PeerFlags,
        config: ConfigInUse,
        datastore: Datastore,
        inflight: InflightLoad,
        metrics: PickerMetrics,
        shared: Mapping[str, SharesLoads],
    ) -> None:
        """Exchange what plugins learn, and `shared`, which are no plugins.

        Raise `ConfigError` for unreadable certificates, or for slices without a cluster.
        """
        self._shared = shared
        self._access: ClusterAccess | None = None
        credentials = None if flags.cert_path is None else PeerCredentials(flags.cert_path)
        is_configured = options.hash_seed_file is not None
        settings = ExchangeSettings(
            flags.pool or options.pool_name, config.hash_seed, is_configured
        )
        series, clock = metrics.peers, time.monotonic
        knowledge = Knowledge(datastore, inflight)
        self._exchange = PeerExchange(settings, knowledge, clock(), time.time())
        self._mesh = Mesh(self._exchange, series, clock, credentials)
        self._discover = self._discovery_of(flags, options, metrics)
        # Replicas of a pool may have it under different keys.
        self.name = self._exchange.pool  # the pool's name among replicas
        self.reports = PoolReports(self._exchange, series, lambda: datastore.synced)
        self._use(config.assembly)
        config.subscribe(self._use)

    def _use(self, assembly: Assembly) -> None:
        plugins = {name: one.plugin for name, one in assembly.instances.items()}
        self._exchange.use({**plugins, **self._shared})
        interval = assembly.data_layer.replica_interval_seconds
        self._mesh.interval_seconds = INTERVAL_SECONDS if interval is None else interval

    @property
    def num_peers(self) -> int | None:
        """The number of other replicas; None while one does not answer."""
        return self._mesh.num_peers

    @property
    def works(self) -> dict[str, Work]:
        return {
            "peer rounds": self._mesh.tick,
            "peer discovery": self._discover,
            "peers": self._mesh.run,
        }

    def load(self) -> None:
        if self._access is not None:
            self._access.load()

    def _discovery_of(self, flags: PeerFlags, options: Options, metrics: PickerMetrics) -> Work:
        service = flags.slices
        if service is None:
            return NamedPeers(flags.names, self._mesh.follow, flags.server_name).run
        cluster = options.kubernetes
        if cluster is None:
            raise ConfigError("--peer-slices needs a pool that is followed in a cluster")
        self._access = ClusterAccess(cluster)

        def follow(hosts: Sequence[str]) -> None:
            self._mesh.follow(peer_addresses({service: hosts}, flags.server_name))

        return partial(
            follow_service,
            self._access.open,
            of_service(flags.namespace or cluster.pool_namespace, service.host),
            follow,
            rng=Random(),
            clock=time.monotonic,
            series=metrics.kubernetes,
        )
