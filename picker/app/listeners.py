"""The picker's ports: ext_proc (and one more for each pool that has its own), gRPC health, HTTP,
endpoint discovery, peers. They open together or not at all.
"""

import asyncio
import errno
import logging
import ssl
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from base.response_bodies import ResponseBodies
from base.series import Gauge
from picker.admin.server import AdminServer
from picker.app.served_pool import ServedPool
from picker.app.shelves import DiscoveryPort, PublishedPool, discovery_port
from picker.cli.options import MetricsTls, Options, PeerFlags, Ports, TlsFlags
from picker.errors import ConfigError, PickerError
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.reports import ResponseReports
from picker.extproc.server import Exchanges, StreamMetrics, build_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.credentials import PeerCredentials
from picker.peers.server import PeerServer, peer_port
from picker.rpc.budget import ByteBudget
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions, TlsMaterial, TlsOptions
from picker.rpc.server import GrpcServer
from picker.rpc.tls import CertificateFolder, cipher_suites, min_version, replace_certificate

log = logging.getLogger(__name__)

DEFAULT_TLS_VERSION = "VersionTLS12"


class StartError(PickerError): ...


class ExtProcPort:
    """Owns the server of ext_proc and its certificate."""

    def __init__(
        self,
        options: Options,
        exchanges: Exchanges,
        health: HealthService,
        streams: StreamMetrics | None = None,
        certificate: TlsMaterial | None = None,
        bodies: ByteBudget | None = None,
        flag: str = "--grpc-port",
        expiry: Gauge | None = None,
    ) -> None:
        """Prepare the port without opening it. Raise `ConfigError` for unusable certificates. If
        the options say so, `health` answers health checks at this port too, and `streams` counts
        its streams. `flag` names the port in messages; `certificate` replaces a self-signed one.
        """
        self._certificates: CertificateFolder | None = None
        if options.tls is not None and options.tls.cert_path is not None:
            shown = None if expiry is None else expiry.labels("--cert-path").set
            self._certificates = CertificateFolder(options.tls.cert_path, "--cert-path", shown)
        self._flag = flag
        self._follows = options.tls is not None and options.tls.reload
        self._options = replace(
            ext_proc_options(options),
            tls=_tls(options.tls, self._certificates, certificate),
            budget=bodies or ByteBudget(options.max_unfinished_body_bytes),
        )
        self._reports: ResponseReports | None = None
        if options.response_bodies is ResponseBodies.USAGE:
            self._reports = ResponseReports(None if streams is None else streams.reports)
        self._server = build_server(
            exchanges,
            options=self._options,
            health=health if options.health_checking else None,
            settings=StreamSettings(conformance=options.conformance),
            streams=streams if options.grpc_stream_metrics else None,
            reports=self._reports,
        )

    async def open(self, stack: AsyncExitStack) -> int:
        stack.push_async_callback(self._server.stop, 0)
        return await bound(self._server.start(), self._flag, self._options.address)

    @property
    def follows_certificates(self) -> bool:
        return self._follows and self._certificates is not None

    async def follow_certificates(self) -> None:
        if self._certificates is not None:
            await self._certificates.watch(self._server.use_certificate)

    async def close(self, grace_seconds: float) -> None:
        """Take no new requests, and give those under way `grace_seconds` to end."""
        if self._reports is not None:
            self._reports.end_when_idle()
        await self._server.stop(grace_seconds)


@dataclass(frozen=True, slots=True)
class OwnPort:
    key: str
    port: int
    exchanges: Exchanges
    health: HealthService


class Listeners:
    """Owns the ports of the picker, with their certificates and the shared byte budget."""

    def __init__(
        self,
        options: Options,
        exchanges: Exchanges,
        health: HealthService,
        admin: AdminServer,
        pools: Sequence[ServedPool],
        metrics: PickerMetrics,
        own: Iterable[OwnPort] = (),
    ) -> None:
        """Prepare the ports without opening them. Raise `ConfigError` for unusable certificates."""
        self._options, self._admin = options, admin
        streams = StreamMetrics(metrics, time.monotonic)
        made = _self_signed() if options.tls is not None and not options.tls.cert_path else None
        bodies = ByteBudget(options.max_unfinished_body_bytes)  # of all ports together
        expiry = metrics.certificate_expiry_timestamp_seconds
        port = partial(ExtProcPort, streams=streams, certificate=made, bodies=bodies, expiry=expiry)
        self._ext_proc = port(options, exchanges, health)
        self._own = {
            one.key: port(
                replace(options, grpc_port=one.port),
                one.exchanges,
                one.health,
                flag=f"--pool {one.key}",
            )
            for one in own
        }
        self._http_certificates, self._http_tls = _metrics_tls(options.metrics_tls, expiry)
        # With ext_proc on a unix socket no other machine needs the health port.
        is_unix = ext_proc_options(options).unix_path is not None
        self._health_options = ServerOptions(
            host="127.0.0.1" if is_unix else options.bind_address, port=options.grpc_health_port
        )
        self._health = GrpcServer(self._health_options, health.methods())
        self._xds: DiscoveryPort | None = None
        if options.xds is not None:
            published = [
                PublishedPool(pool.xds_name, pool.datastore, pool.metrics.xds) for pool in pools
            ]
            self._xds = discovery_port(options.xds, published, metrics.xds)
        self._peers = None if options.peers is None else PeersPort(options.peers, pools)

    async def open(self, stack: AsyncExitStack) -> Ports:
        """Open the ports until `stack` is closed. Raises `StartError`."""
        options = self._options
        # Registered before they open, so that a busy port leaves none of the others open.
        stack.push_async_callback(self._admin.stop)
        stack.push_async_callback(self._health.stop, 0)
        host, port = options.metrics_bind_address, options.metrics_port
        http = self._admin.start(host, port, self._http_tls)
        metrics = await bound(http, "--metrics-port", f"{host}:{port}")
        health_address = self._health_options.address
        health = await bound(self._health.start(), "--grpc-health-port", health_address)
        ext_proc = await self._ext_proc.open(stack)
        pools = {key: await one.open(stack) for key, one in self._own.items()}
        xds = None
        if self._xds is not None:
            stack.push_async_callback(self._xds.stop)
            xds = await bound(self._xds.start(), "--xds-port", self._xds.address)
        return Ports(
            ext_proc,
            health,
            metrics,
            pools=pools,
            xds=xds,
            peers=None if self._peers is None else await self._peers.open(stack),
        )

    def works(self) -> list[tuple[str, Coroutine[None, None, None]]]:
        every = (self._ext_proc, *self._own.values())
        following = [one.follow_certificates() for one in every if one.follows_certificates]
        folder, context = self._http_certificates, self._http_tls
        if folder is not None and context is not None:
            following.append(folder.watch(partial(replace_certificate, context)))
        works = [("certificates", one) for one in following]
        if self._xds is not None:
            works += [("endpoint discovery", feed) for feed in self._xds.works()]
        return [*works, ("history", self._admin.watch())]

    async def close_ext_proc(self, grace_seconds: float) -> None:
        # Together, so that the grace is that of the picker and not of each port.
        every = (self._ext_proc, *self._own.values())
        await asyncio.gather(*(one.close(grace_seconds) for one in every))


class PeersPort:
    def __init__(self, flags: PeerFlags, pools: Sequence[ServedPool]) -> None:
        credentials = None if flags.cert_path is None else PeerCredentials(flags.cert_path)
        self._port = peer_port(flags.bind_address, flags.port, credentials)
        peerings = [pool.peers for pool in pools if pool.peers is not None]
        self._server = PeerServer({one.name: one.reports for one in peerings}, time.monotonic)

    async def open(self, stack: AsyncExitStack) -> int:
        stack.push_async_callback(self._server.stop)
        return await bound(self._server.start(self._port), "--peer-port", self._port.address)


def ext_proc_options(options: Options) -> ServerOptions:
    return ServerOptions(
        host=options.bind_address,
        port=options.grpc_port,
        max_message_bytes=options.grpc_max_recv_msg_bytes,
    )


def _tls(
    flags: TlsFlags | None, folder: CertificateFolder | None, made: TlsMaterial | None
) -> TlsOptions | None:
    if flags is None:
        return None
    return TlsOptions(
        material=(made or _self_signed()) if folder is None else folder.load(),
        min_version=min_version(flags.min_version or DEFAULT_TLS_VERSION),
        cipher_suites=cipher_suites(flags.cipher_suites),
    )


def _self_signed() -> TlsMaterial:
    # Imported on demand: few starts need it, and it costs memory and time.
    from picker.rpc.self_signed import self_signed  # noqa: PLC0415

    log.info("ext_proc uses a self-signed certificate; --cert-path names a real one")
    return self_signed()


def _metrics_tls(
    flags: MetricsTls | None, expiry: Gauge
) -> tuple[CertificateFolder | None, ssl.SSLContext | None]:
    if flags is None:
        return None, None
    folder = CertificateFolder(
        flags.cert_path, "--metrics-cert-dir", expiry.labels("--metrics-cert-dir").set
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    replace_certificate(context, folder.load())
    if flags.client_ca_file is not None:
        try:
            context.load_verify_locations(flags.client_ca_file)
        except OSError as error:
            why = f"cannot use {flags.client_ca_file}: {error.strerror or error}"
            raise ConfigError(f"--metrics-client-ca-file: {why}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return folder, context


async def bound(start: Coroutine[None, None, int], flag: str, address: str) -> int:
    """Await `start`; return the bound port. Raises `StartError` naming `flag` and `address`."""
    try:
        return await start
    except OSError as error:
        # gRPC's errors have a text and no number.
        busy = error.errno == errno.EADDRINUSE or "in use" in str(error).lower()
        reason = "the port is already in use" if busy else (error.strerror or str(error))
        raise StartError(f"cannot listen on {address} ({flag}): {reason}") from error
