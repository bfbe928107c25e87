"""Orders to a running fleet, and `pointsman restart`, which sends them.

Orders arrive through a unix socket in the fleet's folder, one JSON document a line. The client
sends one `Order`; the fleet answers with any number of `OrderProgress`, then one `OrderOutcome`. An
order that has begun continues when its client disconnects.
"""

import argparse
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from enum import Enum

import msgspec

from fleet.errors import FleetError
from fleet.run.running_picker import the_fleet

ALL = "all"
CUT = 3  # all parts are back, but some clients got no answer
MAX_LINE_BYTES = 65_536
_CONNECT_SECONDS = 5.0
Say = Callable[[str], None]


class FleetPart(Enum):
    PICKER = "picker"
    ENVOY = "envoy"
    WORKERS = "workers"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    restart: tuple[FleetPart, ...]


class OrderProgress(msgspec.Struct, frozen=True, tag="progress"):
    line: str


class OrderOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The fleet's last line. `failure` is None on success; `cut` counts unfinished requests."""

    failure: str | None = None
    cut: int = 0


Obey = Callable[[Order, Say], Awaitable[int]]
_Answer = OrderProgress | OrderOutcome


class Control:
    """Passes orders to `obey`, which returns the number of cut requests or raises `FleetError`."""

    def __init__(self, path: str, obey: Obey) -> None:
        self._path, self._obey = path, obey

    async def run(self) -> None:
        """Accept orders until cancelled; clients with orders in progress are notified."""
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
            send(await self._outcome(reader, lambda line: send(OrderProgress(line))))
        except asyncio.CancelledError:
            send(OrderOutcome("the fleet stops"))
            raise
        finally:
            writer.close()  # after everything written so far has been sent

    async def _outcome(self, reader: asyncio.StreamReader, say: Say) -> OrderOutcome:
        try:
            order = msgspec.json.decode(await reader.readline(), type=Order)
        except (ValueError, OSError) as error:  # also raised for a line that is too long
            return OrderOutcome(f"not an order: {error}")
        try:
            return OrderOutcome(cut=await self._obey(order, say))
        except FleetError as error:
            return OrderOutcome(str(error))


@contextlib.asynccontextmanager
async def _listening(
    path: str, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
) -> AsyncIterator[None]:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, 0o600)  # so no other user can connect once it listens
    server = await asyncio.start_unix_server(connected, sock=listening, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):  # since Python 3.13 `close` removes it
            os.unlink(path)


def give(order: Order, path: str, say: Say) -> int:
    """Give an order; return how many requests it cut. Raises `FleetError`, even if partly done."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(path)
            connection.sendall(msgspec.json.encode(order) + b"\n")
            connection.settimeout(None)  # a restart may take any time
            with connection.makefile("rb") as lines:
                outcome = _read(lines, say)
        except OSError as error:
            text = "the fleet takes no orders: it is not ready yet, or about to end"
            raise FleetError(text) from error
    if outcome.failure is not None:
        raise FleetError(outcome.failure)
    return outcome.cut


def _read(lines: Iterable[bytes], say: Say) -> OrderOutcome:
    answers = msgspec.json.Decoder(_Answer)
    for line in lines:
        answer = answers.decode(line)
        if isinstance(answer, OrderOutcome):
            return answer
        say(answer.line)
    return OrderOutcome("the fleet ended before it was done")


def restart_command(given: argparse.Namespace, environment: Mapping[str, str], say: Say) -> int:
    """Restart parts; return 0 once all are back, 3 if requests were cut. Raises `FleetError`."""
    fleet = the_fleet(environment, given.port)
    parts = tuple(FleetPart) if given.part == ALL else (FleetPart(given.part),)
    if fleet.control is None:
        raise FleetError("that fleet takes no orders")
    return CUT if give(Order(parts), fleet.control, say) else 0
