"""Free ports of this machine."""

import errno
import secrets
import socket
from collections.abc import Sequence

# Below those that systems give to outgoing connections, which could take a port before its user.
_LOWEST, _HIGHEST = 15_000, 30_000


def free_ports(count: int, addresses: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """Find ports that are free now, at all of the addresses. Raises OSError."""
    found: list[int] = []
    while len(found) < count:
        port = _free_at(addresses)
        if port is not None and port not in found:
            found.append(port)
    return found


def _free_at(addresses: Sequence[str]) -> int | None:
    port = secrets.randbelow(_HIGHEST - _LOWEST) + _LOWEST
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                raise
    return port
