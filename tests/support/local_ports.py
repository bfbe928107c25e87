"""Ports for servers that need theirs before they begin.

Below those that systems give to outgoing connections and to clients that ask for any port, so that
no other process takes one before its server does; none twice, and other ones in each of
the processes that run the tests.
"""

import os

import conformance.ports

__all__ = ["free_port", "free_ports"]

_PROCESSES = 8
_MINE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
_given: set[int] = set()


def free_port() -> int:
    """A port that is free right now."""
    while True:
        (port,) = conformance.ports.free_ports(1)
        if port % _PROCESSES == _MINE and port not in _given:
            _given.add(port)
            return port


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]
