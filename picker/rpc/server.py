"""A gRPC port on asyncio: binds it, accepts connections, ends them in order."""

import asyncio
import ssl
from collections.abc import Mapping

from picker.rpc.binding import BACKLOG, bound_port, inode, listen
from picker.rpc.call import Served
from picker.rpc.connection import GrpcConnection
from picker.rpc.options import ServerOptions, TlsMaterial
from picker.rpc.tls import replace_certificate, server_context

CLOSING_SECONDS = 1.0  # the time for a peer to read the last frames


class GrpcServer:
    """One listening port for the methods in `served`, by their paths. Owns its connections."""

    def __init__(self, options: ServerOptions, served: Mapping[str, Served]) -> None:
        self._options = options
        self._served = {path.encode(): one for path, one in served.items()}
        self._listener: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None
        self._socket_inode: int | None = None  # of our unix socket
        self._connections: set[GrpcConnection] = set()
        self._all_gone = asyncio.Event()
        self._stopping = False

    async def start(self) -> int:
        """Listen; return the port, 0 for a unix socket. Raises `OSError` if that fails."""
        tls, path = self._options.tls, self._options.unix_path
        self._tls = server_context(tls) if tls is not None else None
        listening = listen(self._options)
        loop = asyncio.get_running_loop()
        create = loop.create_server if path is None else loop.create_unix_server
        handshake = None if self._tls is None else self._options.handshake_seconds
        self._listener = await create(
            self.accept,
            sock=listening,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=handshake,
        )
        self._socket_inode = None if path is None else inode(path)
        return bound_port(listening)

    def use_certificate(self, material: TlsMaterial) -> None:
        """Use `material` for new connections. Raises `OSError` and keeps the old one."""
        if self._tls is not None:
            replace_certificate(self._tls, material)

    async def stop(self, grace_seconds: float) -> None:
        """Accept no new connections, let calls end for `grace_seconds`, then cancel the rest.
        A second call with less grace cuts the first one short.
        """
        if self._listener is None:
            return
        self._stopping = True
        self._listener.close()
        path, own = self._options.unix_path, self._socket_inode
        if path is not None and own is not None and own == inode(path):
            path.unlink(missing_ok=True)  # unless another process has replaced it
        for connection in tuple(self._connections):
            connection.drain()
        if not await self._gone_within(grace_seconds):
            for connection in tuple(self._connections):
                connection.cancel()
            if not await self._gone_within(CLOSING_SECONDS):
                for connection in tuple(self._connections):
                    connection.abort()
                await self._gone_within(CLOSING_SECONDS)

    def accept(self) -> GrpcConnection:
        return GrpcConnection(self._served, self._options, self._connected, self._disconnected)

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
