"""Listening sockets: TCP, and unix sockets in the file system."""

import errno
import os
import socket
import stat
from pathlib import Path

from picker.rpc.options import ServerOptions

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
