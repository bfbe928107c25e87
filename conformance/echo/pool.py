"""The endpoints of a pool: four addresses, two of them ports of one machine, and echo servers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from conformance.echo.server import EchoServer
from conformance.ports import free_ports

ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")


class EchoPool:
    """Echo servers at the endpoints of a pool; the sole owner of them.

    `endpoints` are all `ip:port` of the pool, in the order of its members.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = tuple(endpoints)
        self.servers = {
            endpoint: EchoServer(host.strip("[]"), int(port))
            for endpoint in endpoints
            for host, _, port in (endpoint.rpartition(":"),)
        }

    def at(self, endpoint: str) -> EchoServer:
        """The server of an endpoint."""
        return self.servers[endpoint]

    def same_address(self) -> tuple[str, ...]:
        """Endpoints that differ by their ports alone; empty where there are none."""
        by_host: dict[str, list[str]] = {}
        for endpoint in self.endpoints:
            by_host.setdefault(endpoint.rpartition(":")[0], []).append(endpoint)
        found = [group for group in by_host.values() if len(group) > 1]
        return tuple(found[0]) if found else ()

    async def start(self) -> None:
        """All that do not listen yet. Raises OSError for an address that cannot be had here."""
        for server in self.servers.values():
            await server.start()

    async def stop(self) -> None:
        """Stop all servers of the pool."""
        for server in self.servers.values():
            await server.stop()


def own_endpoints() -> tuple[str, ...]:
    """Four free endpoints of this machine: three addresses, the last of them with two ports."""
    first, second = free_ports(2, ADDRESSES)
    return (*(f"{address}:{first}" for address in ADDRESSES), f"{ADDRESSES[-1]}:{second}")


@asynccontextmanager
async def running(pool: EchoPool) -> AsyncIterator[EchoPool]:
    """The pool, with its servers listening for the length of the block."""
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()
