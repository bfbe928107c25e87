"""Orders to a running fleet: a unix socket in its folder, one JSON document a line.

The client sends one `Order`; the fleet answers with any number of `Progress`, then one `Outcome`,
and hangs up. A client that goes away changes nothing: what has begun goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from enum import Enum

import msgspec

from fleet.errors import FleetError

MAX_LINE_BYTES = 65_536
_CONNECT_SECONDS = 5.0
Say = Callable[[str], None]


class Part(Enum):
    """What can be restarted by itself."""

    PICKER = "picker"
    ENVOY = "envoy"
    WORKERS = "workers"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be restarted, in that order."""

    restart: tuple[Part, ...]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line for the user."""

    line: str


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The last line; `failure` is None when all is done."""

    failure: str | None = None


Obey = Callable[[Order, Say], Awaitable[None]]
_Answer = Progress | Outcome


class Control:
    """Takes orders, each connection one. `obey` carries one out; it raises `FleetError`."""

    def __init__(self, path: str, obey: Obey) -> None:
        self._path, self._obey = path, obey

    async def run(self) -> None:
        """Take orders until cancelled; those under way end then too, and their clients are told."""
        async with asyncio.TaskGroup() as group:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                group.create_task(self._serve(reader, writer), name="order")

            async with _listening(self._path, connected):
                await asyncio.Event().wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(answer: _Answer) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(answer) + b"\n")

        try:
            send(Outcome(await self._outcome(reader, lambda line: send(Progress(line)))))
        except asyncio.CancelledError:
            send(Outcome("the fleet stops"))
            raise
        finally:
            writer.close()  # what is written by then is sent first

    async def _outcome(self, reader: asyncio.StreamReader, say: Say) -> str | None:
        try:
            order = msgspec.json.decode(await reader.readline(), type=Order)
        except (ValueError, OSError) as error:  # also of a line that is too long
            return f"not an order: {error}"
        try:
            await self._obey(order, say)
        except FleetError as error:
            return str(error)
        return None


@contextlib.asynccontextmanager
async def _listening(
    path: str, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
) -> AsyncIterator[None]:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, 0o600)  # before it listens
    server = await asyncio.start_unix_server(connected, sock=listening, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        os.unlink(path)


def give(order: Order, path: str, say: Say) -> None:
    """Have the fleet at `path` carry out `order`; `say` gets its lines.

    Raises `FleetError` with its reason when it does not, or not completely.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(path)
            connection.sendall(msgspec.json.encode(order) + b"\n")
            connection.settimeout(None)  # an order takes as long as it takes
            with connection.makefile("rb") as lines:
                outcome = _read(lines, say)
        except OSError as error:
            text = "the fleet takes no orders: it is not ready yet, or about to end"
            raise FleetError(text) from error
    if outcome.failure is not None:
        raise FleetError(outcome.failure)


def _read(lines: Iterable[bytes], say: Say) -> Outcome:
    answers = msgspec.json.Decoder(_Answer)
    for line in lines:
        answer = answers.decode(line)
        if isinstance(answer, Outcome):
            return answer
        say(answer.line)
    return Outcome("the fleet ended before it was done")
