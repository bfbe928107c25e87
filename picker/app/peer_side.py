"""What a picker does to share its knowledge with other replicas, if it was asked to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random

from picker.app.in_use import ConfigInUse
from picker.app.kubernetes_side import ClusterAccess
from picker.app.listeners import bound
from picker.cli.options import Options, PeerFlags
from picker.config.build import Assembly
from picker.errors import ConfigError
from picker.k8s.service_addresses import ServiceAddresses, of_service
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.credentials import PeerCredentials
from picker.peers.discovery import NamedPeers, peer_addresses
from picker.peers.exchange import Exchange, ExchangeSettings
from picker.peers.knowledge import Knowledge
from picker.peers.mesh import Mesh
from picker.peers.server import Hearing, PeerPort, PeerServer
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad

INTERVAL_SECONDS = 0.05  # between two messages to a peer, at least


class PeerSide:
    """Owns the exchange with other replicas about one pool, and the connections to them; without
    peers nothing.
    """

    def __init__(
        self,
        options: Options,
        config: ConfigInUse,
        datastore: Datastore,
        inflight: InflightLoad,
        metrics: PickerMetrics,
    ) -> None:
        """Opens nothing. Raises `ConfigError` for certificates that cannot be read, and for
        EndpointSlices without a cluster.
        """
        self._exchange: Exchange | None = None
        self._access: ClusterAccess | None = None
        flags = options.peers
        if flags is None:
            return
        credentials = None if flags.cert_path is None else PeerCredentials(flags.cert_path)
        is_configured = options.hash_seed_file is not None
        settings = ExchangeSettings(
            flags.pool or options.pool_name, config.hash_seed, is_configured
        )
        knowledge, clock = Knowledge(datastore, inflight), time.monotonic
        self._exchange = Exchange(settings, knowledge, clock(), time.time())
        self._mesh = Mesh(self._exchange, metrics.peers, clock, credentials)
        self._discovery = self._discovery_of(flags, options, metrics)
        self._hearing = Hearing(self._exchange, metrics.peers, lambda: datastore.synced)
        self.use(config.assembly)
        config.subscribe(self.use)

    def use(self, assembly: Assembly) -> None:
        """Go on with the plugins of another configuration."""
        if self._exchange is None:
            return
        self._exchange.use({name: one.plugin for name, one in assembly.instances.items()})
        interval = assembly.data_layer.replica_interval_seconds
        self._mesh.interval_seconds = INTERVAL_SECONDS if interval is None else interval

    @property
    def hearings(self) -> Mapping[str, Hearing]:
        """What this pool's replicas tell, by the name that they have for the pool."""
        return {} if self._exchange is None else {self._exchange.pool: self._hearing}

    def load(self) -> None:
        """Find credentials for what tells of replicas. Raises `ConfigError`."""
        if self._access is not None:
            self._access.load()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Share until these are cancelled."""
        if self._exchange is None:
            return []
        return [
            group.create_task(self._mesh.tick(), name="peer rounds"),
            group.create_task(self._discovery.run(), name="peer discovery"),
            group.create_task(self._mesh.run(), name="peers"),
        ]

    def _discovery_of(
        self, flags: PeerFlags, options: Options, metrics: PickerMetrics
    ) -> NamedPeers | ServiceAddresses:
        """What tells the mesh which replicas there are."""
        service = flags.slices
        if service is None:
            return NamedPeers(flags.names, self._mesh.follow, flags.server_name)
        cluster = options.kubernetes
        if cluster is None:
            raise ConfigError("--peer-slices needs a pool that is followed in a cluster")
        self._access = ClusterAccess(cluster)

        def follow(hosts: Sequence[str]) -> None:
            self._mesh.follow(peer_addresses({service: hosts}, flags.server_name))

        return ServiceAddresses(
            self._access.open,
            of_service(flags.namespace or cluster.pool_namespace, service.host),
            follow,
            rng=Random(),
            clock=time.monotonic,
            series=metrics.kubernetes,
        )


class PeerPortSide:
    """Owns the port where other replicas tell what they do; without `options.peers` nothing."""

    def __init__(self, options: Options, sides: Sequence[PeerSide]) -> None:
        """Opens nothing. Raises `ConfigError` for certificates that cannot be read."""
        self._server: PeerServer | None = None
        flags = options.peers
        if flags is None:
            return
        credentials = None if flags.cert_path is None else PeerCredentials(flags.cert_path)
        host = f"[{flags.bind_address}]" if ":" in flags.bind_address else flags.bind_address
        self._port = PeerPort(f"{host}:{flags.port}", credentials)
        pools = {name: one for side in sides for name, one in side.hearings.items()}
        self._server = PeerServer(pools, time.monotonic)

    async def open(self, stack: AsyncExitStack) -> int | None:
        """Listen until `stack` is closed; the port, None without peers. Raises `StartError`."""
        if self._server is None:
            return None
        stack.push_async_callback(self._server.stop)
        return await bound(self._server.start(self._port), "--peer-port", self._port.address)
