"""What a gRPC port is made of, whichever transport serves it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from picker.extproc.stream import DEFAULT_MAX_BODY_BYTES

# A buffered body is one message. One that the transport refused would break the stream, where the
# limit on bodies gives a 413; so the latter has to be the smaller.
DEFAULT_MAX_MESSAGE_BYTES = DEFAULT_MAX_BODY_BYTES + 1024 * 1024


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
class ServerOptions:
    """Where to listen and what to accept.

    `port` 0 takes a free one. Without `tls` the port is plain text. `max_body_bytes` bounds one
    request body as a whole (413 beyond it), `max_message_bytes` one gRPC message.
    """

    host: str = "0.0.0.0"
    port: int = 9002
    tls: TlsMaterial | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    transport: Transport = Transport.NATIVE

    @property
    def address(self) -> str:
        """Host and port as one text, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class GrpcServer(Protocol):
    """One listening port. Start it once, inside the event loop it is to live in."""

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        ...

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, let streams end for `grace_seconds`, then cancel what is left."""
        ...

    async def wait_stopped(self) -> None:
        """Return once the server has stopped; at once when it was never started."""
        ...
