"""The addresses of replicas: host names, resolved every few seconds."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from picker.errors import ConfigError

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
MAX_PEERS = 64  # each is sent everything
# Resolves a host to its IP addresses. Raises `OSError`.
Resolve = Callable[[str], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class PeerName:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The address of a possible replica: `target` is `ip:port`, `name` is in its certificate."""

    target: str
    name: str


def peer_name(text: str, default_port: int | None = None) -> PeerName:
    """Parse `host:port` or, with a default port, `host`; IPv6 in brackets. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"'{text}': write IPv6 addresses in brackets")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else default_port
    if (
        not host
        or number is None
        or not 0 < number < 65536
        or (colon and port == "" and text[-1] == ":")
    ):
        raise ConfigError(f"'{text}' is not a peer; write HOST:PORT")
    return PeerName(host, number)


async def resolve(host: str) -> Sequence[str]:
    try:
        return [str(ip_address(host))]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one that is too long
        raise OSError(f"not a host name: {error}") from error
    return sorted({str(info[4][0]) for info in found})


def peer_addresses(
    known: Mapping[PeerName, Sequence[str]], server_name: str = ""
) -> list[PeerAddress]:
    """Return the distinct addresses; certificates name `server_name` or, with "", their host."""
    addresses: dict[str, PeerAddress] = {}
    for name, hosts in known.items():
        for host in hosts:
            target = f"[{host}]:{name.port}" if ":" in host else f"{host}:{name.port}"
            addresses.setdefault(target, PeerAddress(target, server_name or name.host))
    return list(addresses.values())[:MAX_PEERS]


class NamedPeers:
    """Resolves names regularly; a name that fails to resolve keeps its last addresses."""

    def __init__(
        self,
        names: Sequence[PeerName],
        found: Callable[[Sequence[PeerAddress]], None],
        server_name: str = "",
        resolving: Resolve = resolve,
    ) -> None:
        self._names, self._found = tuple(names), found
        self._server_name, self._resolve = server_name, resolving
        self._known: dict[PeerName, Sequence[str]] = {}
        self._complaints: set[str] = set()

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(RESOLVE_SECONDS)

    async def look(self) -> None:
        for name in self._names:
            try:
                self._known[name] = await self._resolve(name.host)
                self._complaints.discard(name.host)
            except OSError as error:
                self._complain(name.host, error)
        self._found(peer_addresses(self._known, self._server_name))

    def _complain(self, host: str, error: OSError) -> None:
        if host not in self._complaints:
            self._complaints.add(host)
            log.warning("peers: '%s' cannot be resolved: %s", host, error)
