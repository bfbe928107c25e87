"""The picker's ports: ext_proc (of several pools: one more for each that wants its own), gRPC
health, HTTP. Opened together or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from picker.admin.server import AdminServer
from picker.cli.options import MetricsTls, Options, Ports, TlsFlags
from picker.errors import ConfigError, PickerError
from picker.extproc.server import (
    BodyBudget,
    Exchanges,
    GrpcServer,
    ServerOptions,
    TlsMaterial,
    TlsOptions,
    build_health_server,
    build_server,
)
from picker.extproc.stream_metrics import StreamMetrics
from picker.rpc.health import HealthService
from picker.rpc.tls import (
    CertificateFolder,
    cipher_suites,
    min_version,
    replace_certificate,
)

log = logging.getLogger(__name__)

DEFAULT_TLS_VERSION = "VersionTLS12"


class StartError(PickerError):
    """A picker that cannot start although its configuration is fine."""


class ExtProcPort:
    """Owns the server of ext_proc and the certificate that it shows.

    With `health` the port answers health checks too. `streams` counts what it serves, if that was
    asked for. `certificate` is shown in place of one made on the spot, `bodies` are bounded in
    place of a budget of its own.
    """

    def __init__(
        self,
        options: Options,
        exchanges: Exchanges,
        health: HealthService,
        streams: StreamMetrics | None = None,
        certificate: TlsMaterial | None = None,
        bodies: BodyBudget | None = None,
        flag: str = "--grpc-port",
    ) -> None:
        """Opens nothing; `flag` is what the port was asked for with.

        Raises `ConfigError` for certificates that cannot be used.
        """
        self._certificates = _certificates(options.tls)
        self._flag = flag
        self._follows = options.tls is not None and options.tls.reload
        self._options = replace(
            ext_proc_options(options),
            tls=_tls(options.tls, self._certificates, certificate),
            streams=streams if options.grpc_stream_metrics else None,
            bodies=bodies or BodyBudget(options.max_unfinished_body_bytes),
        )
        answering = health if options.health_checking else None
        self._server: GrpcServer = build_server(exchanges, options=self._options, health=answering)

    async def open(self, stack: AsyncExitStack) -> int:
        """Listen until `stack` is closed; the port. Raises `StartError`."""
        stack.push_async_callback(self._server.stop, 0)
        return await bound(self._server.start(), self._flag, self._options.address)

    @property
    def follows_certificates(self) -> bool:
        """Whether `follow_certificates` has anything to do."""
        return self._follows and self._certificates is not None

    async def follow_certificates(self) -> None:
        """Show new certificates as they appear, until cancelled."""
        if self._certificates is not None:
            await self._certificates.watch(self._server.use_certificate)

    async def close(self, grace_seconds: float) -> None:
        """Take no new requests, and let those under way end for `grace_seconds`."""
        await self._server.stop(grace_seconds)


class SidePorts:
    """Owns the servers of health and HTTP."""

    def __init__(self, options: Options, health: HealthService, admin: AdminServer) -> None:
        """Opens nothing. Raises `ConfigError` for certificates that cannot be used."""
        self._options = options
        self._admin = admin
        self._certificates, self._metrics_tls = _metrics_tls(options.metrics_tls)
        is_unix = ext_proc_options(options).unix_path is not None
        self._health_options = ServerOptions(
            host="127.0.0.1" if is_unix else options.bind_address,
            port=options.grpc_health_port,
            transport=options.grpc_transport,
        )
        self._health = build_health_server(health, options=self._health_options)

    async def open(self, stack: AsyncExitStack) -> tuple[int, int]:
        """Listen until `stack` is closed; the ports of health and HTTP. Raises `StartError`."""
        options = self._options
        stack.push_async_callback(self._admin.stop)
        stack.push_async_callback(self._health.stop, 0)
        http = (options.metrics_bind_address, options.metrics_port)
        metrics = await bound(
            self._admin.start(*http, self._metrics_tls),
            "--metrics-port",
            f"{options.metrics_bind_address}:{options.metrics_port}",
        )
        health = await bound(
            self._health.start(), "--grpc-health-port", self._health_options.address
        )
        return health, metrics

    def follow_certificates(self) -> list[Coroutine[None, None, None]]:
        """What shows new certificates of the HTTP port as they appear, until cancelled."""
        folder, context = self._certificates, self._metrics_tls
        if folder is None or context is None:
            return []
        return [folder.watch(partial(replace_certificate, context))]


@dataclass(frozen=True, slots=True)
class OwnPort:
    """Where one pool of several is served alone; `health` tells of it alone, too."""

    key: str
    port: int
    exchanges: Exchanges
    health: HealthService


class Listeners:
    """Owns all of them."""

    def __init__(
        self,
        options: Options,
        exchanges: Exchanges,
        health: HealthService,
        admin: AdminServer,
        streams: StreamMetrics | None = None,
        own: Iterable[OwnPort] = (),
    ) -> None:
        """Opens nothing. Raises `ConfigError` for certificates that cannot be used."""
        made = certificate_made_on_the_spot(options.tls)
        bodies = BodyBudget(options.max_unfinished_body_bytes)  # of all ports together
        self._ext_proc = ExtProcPort(
            options, exchanges, health, streams=streams, certificate=made, bodies=bodies
        )
        self._own = {
            one.key: ExtProcPort(
                replace(options, grpc_port=one.port),
                one.exchanges,
                one.health,
                streams=streams,
                certificate=made,
                bodies=bodies,
                flag=f"--pool {one.key}",
            )
            for one in own
        }
        self._beside = SidePorts(options, health, admin)

    async def open(self, stack: AsyncExitStack) -> Ports:
        """Open the ports; what is open is closed with `stack`, whatever happens.

        Raises `StartError`.
        """
        health, metrics = await self._beside.open(stack)
        port = await self._ext_proc.open(stack)
        pools = {key: await one.open(stack) for key, one in self._own.items()}
        return Ports(port, health, metrics, pools=pools)

    def follow_certificates(self) -> list[Coroutine[None, None, None]]:
        """What shows new certificates as they appear, until cancelled."""
        following = [one.follow_certificates() for one in self._all if one.follows_certificates]
        return [*following, *self._beside.follow_certificates()]

    async def close_ext_proc(self, grace_seconds: float) -> None:
        """Take no new requests, and let those under way end for `grace_seconds`."""
        await asyncio.gather(*(one.close(grace_seconds) for one in self._all))

    @property
    def _all(self) -> tuple[ExtProcPort, ...]:
        return (self._ext_proc, *self._own.values())


def ext_proc_options(options: Options) -> ServerOptions:
    """How ext_proc listens, but for what TLS shows."""
    return ServerOptions(
        host=options.bind_address,
        port=options.grpc_port,
        max_message_bytes=options.grpc_max_recv_msg_bytes,
        transport=options.grpc_transport,
    )


def _certificates(flags: TlsFlags | None) -> CertificateFolder | None:
    if flags is None or flags.cert_path is None:
        return None
    return CertificateFolder(flags.cert_path)


def certificate_made_on_the_spot(flags: TlsFlags | None) -> TlsMaterial | None:
    """A certificate to show where one is needed and none was given."""
    return _self_signed() if flags is not None and flags.cert_path is None else None


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
    # Loaded on demand: what makes certificates costs memory and time that few starts need.
    from picker.rpc.self_signed import self_signed  # noqa: PLC0415

    log.info("ext_proc shows a certificate made on the spot; --cert-path names a real one")
    return self_signed()


def _metrics_tls(
    flags: MetricsTls | None,
) -> tuple[CertificateFolder | None, ssl.SSLContext | None]:
    """Where the certificate of the HTTP port comes from, and what shows it."""
    if flags is None:
        return None, None
    folder = CertificateFolder(flags.cert_path, "--metrics-cert-dir")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    replace_certificate(context, folder.load())
    if flags.client_ca_file is not None:
        try:
            context.load_verify_locations(flags.client_ca_file)
        except OSError as error:
            raise _unusable("--metrics-client-ca-file", flags.client_ca_file, error) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return folder, context


def _unusable(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{flag}: cannot use {path}: {error.strerror or error}")


async def bound(start: Coroutine[None, None, int], flag: str, address: str) -> int:
    """The port that `start` has bound. Raises `StartError`, which names `flag` and `address`."""
    try:
        return await start
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE or "in use" in str(error).lower()
        reason = "the port is already in use" if busy else (error.strerror or str(error))
        raise StartError(f"cannot listen on {address} ({flag}): {reason}") from error
