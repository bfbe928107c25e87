"""A gRPC port on asyncio: a TCP or unix socket, its connections, and their graceful end."""

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from picker.rpc.call import Served
from picker.rpc.connection import GrpcConnection
from picker.rpc.options import ServerOptions, TlsMaterial
from picker.rpc.tls import replace_certificate, server_context

BACKLOG = 1024  # connections not accepted yet
UNIX_SOCKET_MODE = 0o660  # a proxy in another container shares the group, not the user
# Detect a vanished peer within two minutes, on an idle connection, and on one with unacknowledged
# data, to which keepalive does not apply and for which the system would retry for 15 minutes.
_PEER_LOSS = (
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 120_000),  # milliseconds
)


def listen(options: ServerOptions) -> socket.socket:
    """Create a listening socket. Raises `OSError` if that fails."""
    try:
        path = options.unix_path
        return _listen_tcp(options) if path is None else _listen_unix(path)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {options.address}: {error}") from error


def _listen_tcp(options: ServerOptions) -> socket.socket:
    # `::` accepts IPv4 too, like other gRPC servers.
    wide = options.host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.create_server(
        (options.host, options.port), family=family, backlog=BACKLOG, dualstack_ipv6=wide
    )
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
    for name, value in _PEER_LOSS:
        option = getattr(socket, name, None)  # some systems lack some of them
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
    return listening


def _listen_unix(path: Path) -> socket.socket:
    remove_stale(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        path.chmod(UNIX_SOCKET_MODE)  # before `listen`, so that no client connects earlier
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def remove_stale(path: Path) -> None:
    """Remove a socket without a listening process. Raises `OSError` for anything else at `path`."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise OSError(errno.EEXIST, f"{path} is there already and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def bound_port(listening: socket.socket) -> int:
    """Return the port of a TCP socket; 0 for a unix socket."""
    name = listening.getsockname()
    return int(name[1]) if isinstance(name, tuple) else 0


def inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


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
        """Use `material` for new connections. If unusable, raises `OSError` and has no effect."""
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
