"""The gRPC shell on asyncio: binds a port, keeps its connections."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from picker.extproc.h2_connection import GrpcConnection
from picker.extproc.health import HealthService
from picker.extproc.http2 import Http2Engine, Http2Listener
from picker.extproc.http2_frames import FrameEngine
from picker.extproc.options import ServerOptions, TlsMaterial, Transport
from picker.extproc.pump import ExchangeSource
from picker.extproc.services import methods

BACKLOG = 1024  # connections not accepted yet
CLOSING_SECONDS = 1.0  # how long a peer may take to read our last words
# A peer that vanished is noticed within two minutes: when nothing is sent, and when something is,
# for which keepalive does not count and the system alone would try for a quarter of an hour.
_PEER_LOSS = (
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 120_000),  # milliseconds
)


class H2Server:
    """One listening port; see `options.GrpcServer`. Owns its connections."""

    def __init__(
        self,
        options: ServerOptions,
        health: HealthService | None,
        exchanges: ExchangeSource | None,
    ) -> None:
        self._options = options
        self._engine = _engine(options.transport)
        self._listener: asyncio.Server | None = None
        self._connections: set[GrpcConnection] = set()
        self._all_gone = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopping = False
        self._cancelling = False
        self._methods = methods(
            exchanges,
            health,
            max_body_bytes=options.max_body_bytes,
            is_stopping=lambda: self._cancelling,
        )

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        context = _ssl_context(self._options.tls) if self._options.tls is not None else None
        listening = _listen(self._options)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._accept, sock=listening, ssl=context, backlog=BACKLOG
        )
        return int(listening.getsockname()[1])

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, let streams end for `grace_seconds`, then cancel what is left.

        A second call with less patience cuts the first one short.
        """
        if self._listener is None:
            return
        self._stopping = True
        self._listener.close()
        for connection in tuple(self._connections):
            connection.drain()
        if not await self._gone_within(grace_seconds):
            self._cancelling = True
            for connection in tuple(self._connections):
                connection.cancel()
            if not await self._gone_within(CLOSING_SECONDS):
                for connection in tuple(self._connections):
                    connection.abort()
                await self._gone_within(CLOSING_SECONDS)
        self._stopped.set()

    async def wait_stopped(self) -> None:
        """Return once the server has stopped; at once when it was never started."""
        if self._listener is not None:
            await self._stopped.wait()

    def _accept(self) -> GrpcConnection:
        return GrpcConnection(
            self._methods,
            self._options.max_message_bytes,
            self._connected,
            self._disconnected,
            self._engine,
        )

    def _connected(self, connection: GrpcConnection) -> None:
        self._connections.add(connection)
        if self._stopping:
            connection.drain()

    def _disconnected(self, connection: GrpcConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_gone.set()

    async def _gone_within(self, seconds: float) -> bool:
        if not self._connections:
            return True
        self._all_gone.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._all_gone.wait()
        except TimeoutError:
            return False
        return True


def _engine(transport: Transport) -> Callable[[Http2Listener], Http2Engine]:
    if transport is Transport.NATIVE:
        return FrameEngine
    # Loaded on demand: it costs start-up time and memory that the other engine does not need.
    from picker.extproc.http2_library import LibraryEngine  # noqa: PLC0415

    return LibraryEngine


def _listen(options: ServerOptions) -> socket.socket:
    """A listening socket; `::` takes IPv4 too, as with other gRPC servers."""
    wide = options.host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server(
            (options.host, options.port), family=family, backlog=BACKLOG, dualstack_ipv6=wide
        )
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {options.address}: {error}") from error
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
    for name, value in _PEER_LOSS:
        option = getattr(socket, name, None)  # not every system has them all
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
    return listening


def _ssl_context(tls: TlsMaterial) -> ssl.SSLContext:
    """TLS that offers HTTP/2 only. Raises `ssl.SSLError`, an `OSError`, for an unusable pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    with _as_file(tls.private_key + b"\n" + tls.certificate_chain) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to `content`, which `ssl` takes from files only; in memory where that is possible."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner only
            file.write(content)
            file.flush()
            yield file.name
