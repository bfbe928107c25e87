"""The settings of one gRPC port."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from picker.rpc.budget import ByteBudget

DEFAULT_MAX_MESSAGE_BYTES = 65 * 1024 * 1024  # a proxy may show a whole body as one message
UNIX_SCHEME = "unix:"


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """A PEM private key and the PEM certificate chain for it."""

    private_key: bytes
    certificate_chain: bytes


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """The TLS options of a port. `cipher_suites`, in OpenSSL's names, are those for TLS 1.2.

    If there are none, the library chooses. With `client_authority`, PEM certificates, only clients
    with a certificate signed by one of these may connect. `renewed` is called at each handshake and
    returns the options that replace these; it must be quick.
    """

    material: TlsMaterial
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    cipher_suites: tuple[str, ...] = ()
    client_authority: bytes | None = None
    renewed: Callable[[], TlsOptions] | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The address of a port and its limits.

    `host` is an address, or a unix socket as `unix:///path` or by its absolute path. `port` 0
    selects a free one. `budget` bounds the incomplete messages of all calls together. A connection
    without a call for `idle_seconds` is closed gracefully.
    """

    host: str = "0.0.0.0"
    port: int = 9002
    tls: TlsOptions | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    budget: ByteBudget = field(default_factory=ByteBudget)
    handshake_seconds: float = 20.0
    idle_seconds: float = 900.0

    @property
    def unix_path(self) -> Path | None:
        if self.host.startswith(UNIX_SCHEME):
            return Path(self.host.removeprefix(UNIX_SCHEME).removeprefix("//"))
        return Path(self.host) if self.host.startswith("/") else None

    @property
    def address(self) -> str:
        if self.unix_path is not None:
            return f"{UNIX_SCHEME}{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
