"""The real client of an API server, connected to the fake one or to a socket of the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

from picker.k8s.client import ClientLimits, KubernetesClient
from picker.k8s.credentials import Access, Credentials


class Accesses:
    def __init__(self, *accesses: Access) -> None:
        self._left = list(accesses)
        self.loads: list[bool] = []

    def load(self, *, anew: bool) -> Access:
        self.loads.append(anew)
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


@asynccontextmanager
async def client_of(
    *accesses: Access, limits: ClientLimits | None = None
) -> AsyncIterator[KubernetesClient]:
    credentials = Credentials(Accesses(*accesses), asyncio.get_running_loop().time)
    async with KubernetesClient(credentials, rng=Random(1), limits=limits) as client:
        yield client


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(*pieces: bytes, holds: bool = False) -> AsyncIterator[str]:
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if holds:
                await done.wait()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        done.set()
        server.close()
