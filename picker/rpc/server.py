"""The gRPC shell on asyncio: binds a port, keeps its connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from picker.extproc.services import MethodTable
from picker.rpc.binding import BACKLOG, bound_port, inode, listen
from picker.rpc.connection import GrpcConnection
from picker.rpc.http2 import Http2Engine, Http2Listener
from picker.rpc.http2_frames import FrameEngine
from picker.rpc.options import ServerOptions, TlsMaterial, Transport
from picker.rpc.tls import replace_certificate, server_context

CLOSING_SECONDS = 1.0  # how long a peer may take to read our last words


class H2Server:
    """One listening port; see `options.GrpcServer`. Owns its connections."""

    def __init__(self, options: ServerOptions, table: MethodTable) -> None:
        self._options = options
        self._engine = _engine(options.transport)
        self._listener: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        self._socket_inode: int | None = None  # of the unix socket that is ours
        self._connections: set[GrpcConnection] = set()
        self._all_gone = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopping = False
        self._cancelling = False
        self._methods = table(lambda: self._cancelling)

    async def start(self) -> int:
        """Listen; returns the bound port. Raises `OSError` when the port cannot be had."""
        tls, path = self._options.tls, self._options.unix_path
        self._tls = server_context(tls) if tls is not None else None
        listening = listen(self._options)
        loop = asyncio.get_running_loop()
        create = loop.create_server if path is None else loop.create_unix_server
        patience = None if self._tls is None else self._options.handshake_seconds
        self._listener = await create(
            self._accept,
            sock=listening,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=patience,
        )
        self._socket_inode = None if path is None else inode(path)
        return bound_port(listening)

    def use_certificate(self, material: TlsMaterial) -> None:
        """Show `material` to new connections; see `options.GrpcServer`."""
        if self._tls is not None:
            replace_certificate(self._tls, material)

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, let streams end for `grace_seconds`, then cancel what is left.

        A second call with less patience cuts the first one short.
        """
        if self._listener is None:
            return
        self._stopping = True
        self._listener.close()
        self._remove_socket()
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

    def _remove_socket(self) -> None:
        """Leave no unix socket behind, unless another process has put its own there."""
        path = self._options.unix_path
        own = self._socket_inode
        if path is not None and own is not None and own == inode(path):
            path.unlink(missing_ok=True)

    def _accept(self) -> GrpcConnection:
        return GrpcConnection(
            self._methods,
            self._options,
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
    from picker.rpc.http2_library import LibraryEngine  # noqa: PLC0415

    return LibraryEngine
