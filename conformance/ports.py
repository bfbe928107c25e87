"""Free ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence


def free_ports(count: int, addresses: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """Ports that nobody listens on right now, at any of the addresses. Raises OSError."""
    found: list[int] = []
    while len(found) < count:
        port = _free_at(addresses)
        if port is not None and port not in found:
            found.append(port)
    return found


def _free_at(addresses: Sequence[str]) -> int | None:
    port = 0
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                if port == 0:
                    raise
                return None
            port = probe.getsockname()[1]
    return port
