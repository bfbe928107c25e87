"""Free TCP ports of this machine, for a fleet's processes."""

import socket

from fleet.errors import FleetError

_LAST_PORT = 65_535


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers set it: connections in TIME_WAIT do not make a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(host: str, count: int, first: int) -> list[int]:
    """Find `count` free ports, the lowest from `first` up. They are neighbours of a known port,
    because one that the kernel chooses could be taken by an outgoing connection while its owner
    restarts. Raises `FleetError`.
    """
    found: list[int] = []
    for port in range(first, _LAST_PORT + 1):
        if len(found) == count:
            return found
        if is_free(host, port):
            found.append(port)
    if len(found) == count:
        return found
    raise FleetError(f"fewer than {count} free ports from {first} up on {host}")


def require_free(host: str, port: int) -> None:
    if not is_free(host, port):
        raise FleetError(
            f"port {port} on {host} is busy: stop what listens there, or choose another with --port"
        )
