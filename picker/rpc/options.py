"""What a gRPC port is made of, whichever transport serves it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from picker.extproc.body_budget import BodyBudget
from picker.extproc.request_phase import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_HEADER_BYTES,
    DEFAULT_MAX_HEADERS,
    Limits,
)
from picker.extproc.stream_metrics import StreamMetrics

# A buffered body is one message. One that the transport refused would break the stream, where the
# limit on bodies gives a 413; so the latter has to be the smaller.
DEFAULT_MAX_MESSAGE_BYTES = DEFAULT_MAX_BODY_BYTES + 1024 * 1024
# Eight of the largest bodies at once; what is small arrives in one piece, and needs no room.
DEFAULT_MAX_UNFINISHED_BODY_BYTES = 8 * DEFAULT_MAX_BODY_BYTES
UNIX_SCHEME = "unix:"


class Transport(Enum):
    """Which HTTP/2 implementation carries gRPC."""

    NATIVE = "native"  # an asyncio protocol on HTTP/2 frames of our own
    H2 = "h2"  # the same on the `h2` library
    GRPCIO = "grpcio"  # grpc.aio, with threads of its own

    def __str__(self) -> str:
        """As the command line spells it."""
        return self.value


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What a TLS server shows: a PEM private key and the PEM certificate chain for it."""

    private_key: bytes
    certificate_chain: bytes


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a port speaks TLS. `cipher_suites`, in OpenSSL's names, are those for TLS 1.2.

    Empty: the library's choice.
    """

    material: TlsMaterial
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    cipher_suites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and what to accept.

    `host` is an address, or a unix socket as `unix:///path` or by its absolute path; `port` then
    means nothing. `port` 0 takes a free one. Without `tls` the port is plain text. A request with a
    body over `max_body_bytes` in sum is a 413, with more headers than `max_headers` or
    `max_header_bytes` a 431. `max_message_bytes` bounds one gRPC message. `streams` counts ext_proc
    streams (None: nobody does), `bodies` bounds what their request bodies take together while they
    arrive. A peer that has not shaken hands within `handshake_seconds`, TLS and HTTP/2, is cut off;
    a connection without a call for `idle_seconds` is closed in order.
    """

    host: str = "0.0.0.0"
    port: int = 9002
    tls: TlsOptions | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_headers: int = DEFAULT_MAX_HEADERS
    max_header_bytes: int = DEFAULT_MAX_HEADER_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    transport: Transport = Transport.NATIVE
    streams: StreamMetrics | None = None
    bodies: BodyBudget = field(default_factory=BodyBudget)
    handshake_seconds: float = 20.0
    idle_seconds: float = 900.0

    @property
    def limits(self) -> Limits:
        """How large a request may be."""
        return Limits(self.max_body_bytes, self.max_headers, self.max_header_bytes, self.bodies)

    @property
    def unix_path(self) -> Path | None:
        """The unix socket to listen on, None for TCP."""
        if self.host.startswith(UNIX_SCHEME):
            return Path(self.host.removeprefix(UNIX_SCHEME).removeprefix("//"))
        return Path(self.host) if self.host.startswith("/") else None

    @property
    def address(self) -> str:
        """Host and port, or the unix socket, as one text, for messages."""
        if self.unix_path is not None:
            return f"{UNIX_SCHEME}{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class GrpcServer(Protocol):
    """One listening port. Start it once, inside the event loop it is to live in."""

    async def start(self) -> int:
        """Listen; returns the bound port, 0 for a unix socket. Raises `OSError` when that cannot be
        had.
        """
        ...

    def use_certificate(self, material: TlsMaterial) -> None:
        """Show `material` to new connections from now on.

        Raises `OSError` when it cannot be used, and goes on with what it has. Without TLS it does
        nothing.
        """
        ...

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, let streams end for `grace_seconds`, then cancel what is left."""
        ...

    async def wait_stopped(self) -> None:
        """Return once the server has stopped; at once when it was never started."""
        ...
