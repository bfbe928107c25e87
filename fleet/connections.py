"""How many TCP connections a process of ours has at a port, by what Linux says of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


def connections(pid: int, port: int) -> int:
    """Connections of process `pid` whose local port is `port`, idle ones included.

    0 for a process that is gone.
    """
    sockets = _sockets(pid)
    return sum(inode in sockets for inode in _at_port(pid, port))


def _sockets(pid: int) -> set[str]:
    """The inodes of its open sockets."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):  # closed since
                name = os.readlink(entry.path)
                if name.startswith("socket:["):
                    found.add(name[8:-1])
    return found


def _at_port(pid: int, port: int) -> list[str]:
    """The inodes of all connections at a local port, whoever has them."""
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "net" / table).read_text().splitlines()[1:]
            found += [
                inode
                for _, local, _, state, _, _, _, _, _, inode, *_ in map(str.split, lines)
                if state != _LISTENING and int(local.rpartition(":")[2], 16) == port
            ]
    return found
