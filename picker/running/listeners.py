"""The picker's three ports: ext_proc, gRPC health, HTTP. Opened together or not at all."""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

from picker.admin.server import AdminServer
from picker.errors import ConfigError, PickerError
from picker.extproc.health import HealthService
from picker.extproc.pump import ExchangeSource
from picker.extproc.server import (
    GrpcServer,
    ServerOptions,
    TlsMaterial,
    TlsOptions,
    build_health_server,
    build_server,
)
from picker.extproc.tls import CertificateFolder, cipher_suites, min_version
from picker.running.options import MetricsTls, Options, Ports, TlsFlags

log = logging.getLogger(__name__)

DEFAULT_TLS_VERSION = "VersionTLS12"


class StartError(PickerError):
    """A picker that cannot start although its configuration is fine."""


class Listeners:
    """Owns the servers and the certificate that they show."""

    def __init__(
        self,
        options: Options,
        exchanges: ExchangeSource,
        health: HealthService,
        admin: AdminServer,
    ) -> None:
        """Opens nothing. Raises `ConfigError` for certificates that cannot be used."""
        self._options = options
        self._admin = admin
        self._certificates = _certificates(options.tls)
        self._metrics_tls = _metrics_context(options.metrics_tls)
        self._ext_proc_options = ServerOptions(
            host=options.bind_address,
            port=options.grpc_port,
            tls=_tls(options.tls, self._certificates),
            max_message_bytes=options.grpc_max_recv_msg_bytes,
            transport=options.grpc_transport,
        )
        host = options.bind_address if self._ext_proc_options.unix_path is None else "127.0.0.1"
        self._health_options = ServerOptions(
            host=host, port=options.grpc_health_port, transport=options.grpc_transport
        )
        answering = health if options.health_checking else None
        self._ext_proc: GrpcServer = build_server(
            exchanges, options=self._ext_proc_options, health=answering
        )
        self._health = build_health_server(health, options=self._health_options)

    @property
    def address(self) -> str:
        """Where ext_proc listens, as one text."""
        return self._ext_proc_options.address

    async def open(self, stack: AsyncExitStack) -> Ports:
        """Open the ports; what is open is closed with `stack`, whatever happens.

        Raises `StartError`.
        """
        options = self._options
        stack.push_async_callback(self._admin.stop)
        stack.push_async_callback(self._health.stop, 0)
        stack.push_async_callback(self._ext_proc.stop, 0)
        http = (options.metrics_bind_address, options.metrics_port)
        return Ports(
            metrics=await _bound(
                self._admin.start(*http, self._metrics_tls),
                "--metrics-port",
                f"{options.metrics_bind_address}:{options.metrics_port}",
            ),
            health=await _bound(
                self._health.start(), "--grpc-health-port", self._health_options.address
            ),
            grpc=await _bound(
                self._ext_proc.start(), "--grpc-port", self._ext_proc_options.address
            ),
        )

    @property
    def follows_certificates(self) -> bool:
        """Whether `follow_certificates` has anything to do."""
        tls = self._options.tls
        return tls is not None and tls.reload and self._certificates is not None

    async def follow_certificates(self) -> None:
        """Show new certificates as they appear, until cancelled."""
        if self._certificates is not None:
            await self._certificates.watch(self._ext_proc.use_certificate)

    async def close_ext_proc(self, grace_seconds: float) -> None:
        """Take no new requests, and let those under way end for `grace_seconds`."""
        await self._ext_proc.stop(grace_seconds)


def _certificates(flags: TlsFlags | None) -> CertificateFolder | None:
    if flags is None or flags.cert_path is None:
        return None
    return CertificateFolder(flags.cert_path)


def _tls(flags: TlsFlags | None, folder: CertificateFolder | None) -> TlsOptions | None:
    if flags is None:
        return None
    return TlsOptions(
        material=_self_signed() if folder is None else folder.load(),
        min_version=min_version(flags.min_version or DEFAULT_TLS_VERSION),
        cipher_suites=cipher_suites(flags.cipher_suites),
    )


def _self_signed() -> TlsMaterial:
    # Loaded on demand: what makes certificates costs memory and time that few starts need.
    from picker.extproc.self_signed import self_signed  # noqa: PLC0415

    log.info("ext_proc shows a certificate made on the spot; --cert-path names a real one")
    return self_signed()


def _metrics_context(flags: MetricsTls | None) -> ssl.SSLContext | None:
    if flags is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(flags.cert_path / "tls.crt", flags.cert_path / "tls.key")
    except OSError as error:  # ssl.SSLError is one
        raise _unusable("--metrics-cert-dir", flags.cert_path, error) from error
    if flags.client_ca_file is not None:
        try:
            context.load_verify_locations(flags.client_ca_file)
        except OSError as error:
            raise _unusable("--metrics-client-ca-file", flags.client_ca_file, error) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _unusable(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{flag}: cannot use {path}: {error.strerror or error}")


async def _bound(start: Coroutine[None, None, int], flag: str, address: str) -> int:
    try:
        return await start
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE or "in use" in str(error).lower()
        reason = "the port is already in use" if busy else (error.strerror or str(error))
        raise StartError(f"cannot listen on {address} ({flag}): {reason}") from error
