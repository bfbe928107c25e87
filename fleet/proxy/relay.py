"""A fixed TCP address in front of a server that moves."""

import asyncio
import contextlib
import socket

from fleet.envoy.settings import SocketAddress
from fleet.errors import FleetError

_PIECE_BYTES = 1 << 16
_PAUSE_SECONDS = 0.5  # while the system has no descriptor for another connection


class Relay:
    """Forwards new connections to `target`; while that refuses them, so does the relay."""

    def __init__(self, address: SocketAddress, target: SocketAddress) -> None:
        """Begin to listen. Raises `FleetError` when another server listens there."""
        self.target = target
        try:
            self._socket = socket.create_server((address.host, address.port))
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise FleetError(f"cannot listen on {where}: {error.strerror or error}") from error
        self._socket.setblocking(False)

    async def run(self) -> None:
        """Serve until cancelled; then no connection remains."""
        loop = asyncio.get_running_loop()
        with self._socket:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        client, _ = await loop.sock_accept(self._socket)
                    except OSError:
                        await asyncio.sleep(_PAUSE_SECONDS)
                        continue
                    group.create_task(self._carry(client), name="relay")

    async def _carry(self, client: socket.socket) -> None:
        target, loop = self.target, asyncio.get_running_loop()
        with client, socket.socket() as server, contextlib.suppress(OSError):
            server.setblocking(False)
            await loop.sock_connect(server, (target.host, target.port))
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(_pump(client, server), name="relay-to-server")
                await _pump(server, client)
                sending.cancel()


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, _PIECE_BYTES):
            await loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)
