"""One load-generating process: its part of the load, its start, and its stream of results.

Each process draws all arrivals and lengths from the seed, but makes and sends only every n-th
session, at its time after a common beginning; so the load does not depend on their number. Pickled
values pass through a pair of sockets: the `LoadShard`; None, when the process is ready; the time of
the beginning (`perf_counter`, the same clock in all processes of a machine); every tenth of a
second an `Observed` with new results; None after the last. Any other byte, or the end of the
connection, stops the process early, so that none outlives the bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any
from urllib.parse import urlsplit

import uvloop

from fleet.bench.client import Client, Clock
from fleet.bench.driver import Driver, RequestForm, Sender
from fleet.bench.flags import LoadSettings
from fleet.bench.load import StageLoad, draws_of, drive, sessions_of
from fleet.bench.summary import Observed
from fleet.bench.workload import Sessions, TurnSession, WordRing
from fleet.errors import FleetError

UPDATE_SECONDS = 0.1
STOP_SECONDS = 5.0
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    host: str
    port: int
    is_tls: bool
    head: bytes

    def client(self, timeout_seconds: float) -> Client:
        loop = asyncio.get_running_loop()
        tls = ssl.create_default_context() if self.is_tls else None

        async def connect(protocol: Callable[[], asyncio.Protocol]) -> object:
            return await loop.create_connection(protocol, self.host, self.port, ssl=tls)

        return Client(connect, self.head, time.perf_counter, timeout_seconds)


def endpoint_of(base: str, is_chat: bool, headers: Sequence[tuple[str, str]]) -> Target:
    """Read the address `base`, with or without the `/v1` that other clients require."""
    parts = urlsplit(base)
    path = parts.path.rstrip("/").removesuffix("/v1")
    path += "/v1/chat/completions" if is_chat else "/v1/completions"
    host = (parts.hostname or "").encode("idna").decode()
    is_tls = parts.scheme == "https"
    lines = [f"POST {path} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
    lines += ["content-type: application/json", "accept: text/event-stream"]
    lines += [f"{name}: {value}" for name, value in headers]
    head = "".join(f"{line}\r\n" for line in lines).encode()
    return Target(base, host, parts.port or (443 if is_tls else 80), is_tls, head)


@dataclass(frozen=True, slots=True)
class LoadShard:
    """The part of a stage that one process sends. `novelty` makes its texts differ from others."""

    number: int
    processes: int
    settings: LoadSettings
    load: StageLoad
    draws: int
    endpoint: Target
    form: RequestForm
    timeout_seconds: float
    tokens_per_word: float
    novelty: int

    def driver(self, client: Sender[bytes], clock: Clock) -> Driver[bytes]:
        driver = Driver(client, self.form, clock, self.settings.think)
        requests = self.settings.requests
        driver.max_requests = None if requests is None else self._part(requests)
        return driver

    def prepared(self, driver: Driver[bytes]) -> Callable[[], Coroutine[Any, Any, None]]:
        rng, load = draws_of(self.settings.seed, self.draws), self.load
        ring = WordRing(rng.getrandbits(32) ^ self.novelty, self.tokens_per_word)
        if load.concurrency is not None:
            load = replace(load, concurrency=self._part(load.concurrency))
        sessions = self._own(sessions_of(self.settings), ring, rng)
        return partial(drive, driver, load, self.settings, sessions, rng)

    def _part(self, whole: int) -> int:
        return (whole - self.number + self.processes - 1) // self.processes

    def _own(self, every: Sessions, ring: WordRing, rng: Random) -> Iterator[TurnSession | None]:
        texts = _OwnTexts(ring)
        sessions = iter(every(texts, rng))
        for number in count():
            texts.are_made = is_own = number % self.processes == self.number
            session = next(sessions, None)
            if session is None:
                return
            yield session if is_own else None


@dataclass(slots=True)
class _OwnTexts:
    """Makes no text for sessions of other processes: the draws do not depend on texts."""

    ring: WordRing
    are_made: bool = False

    def text(self, key: int, num_tokens: int) -> str:
        return self.ring.text(key, num_tokens) if self.are_made else ""


class _Channel:
    """Sends and receives values, which it trusts: this program is at both ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connection: socket.socket) -> _Channel:
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, value: object) -> None:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> Any:
        """Return the next value. Raises `EOFError` or `OSError` when the other end has closed."""
        size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        return pickle.loads(await self._reader.readexactly(size))

    def stop(self) -> None:
        self._writer.write(b".")

    async def wait_for_stop(self) -> None:
        with contextlib.suppress(OSError):
            await self._reader.read(1)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class ShardProcess:
    def __init__(self, process: asyncio.subprocess.Process, channel: _Channel, name: str) -> None:
        self.seen = Observed([], [], 0, 0, 0.0)
        self.process = process
        self.channel = channel
        self._name = name

    async def receive(self) -> Any:
        """Return the next value. Raises `FleetError` if the process has ended."""
        try:
            return await self.channel.receive()
        except (EOFError, OSError) as error:
            status = await self.process.wait()
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            raise FleetError(f"{self._name} {how}; its share of the load is lost") from error

    async def follow(self) -> None:
        """Return once the process has sent its shard and has all answers. Raises `FleetError`."""
        seen = self.seen
        while (new := await self.receive()) is not None:
            seen.outcomes += new.outcomes
            seen.pulses += new.pulses
            seen.started, seen.in_flight = new.started, new.in_flight
            seen.cpu_seconds = new.cpu_seconds


@contextlib.asynccontextmanager
async def started(shard: LoadShard) -> AsyncIterator[ShardProcess]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            # -P: no folder of the current directory replaces the package.
            *(sys.executable, "-P", "-m", "fleet.bench.shard", str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # the bench handles Ctrl-C
        )
    channel = await _Channel.over(ours)
    try:
        channel.send(shard)
        name = f"process {shard.number + 1} of {shard.processes} of the bench"
        yield ShardProcess(process, channel, name)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await channel.close()


async def follow(processes: Sequence[ShardProcess]) -> None:
    """Follow all processes to their ends; a cancellation stops them first. Raises `FleetError`."""
    following = asyncio.gather(*(one.follow() for one in processes))
    try:
        # Shielded, so that after Ctrl-C the last results still arrive.
        await asyncio.shield(following)
    except asyncio.CancelledError:
        for one in processes:
            one.channel.stop()
        await asyncio.wait((following,), timeout=STOP_SECONDS)
        raise


async def _send_shard(bench: _Channel) -> None:
    shard: LoadShard = await bench.receive()
    client = shard.endpoint.client(shard.timeout_seconds)
    driver = shard.driver(client, time.perf_counter)
    drive_it = shard.prepared(driver)
    gc.freeze()  # collections of long-lived objects would make sends late
    bench.send(None)
    driver.begin_at = await bench.receive()
    cpu = time.process_time()
    stage = asyncio.create_task(drive_it(), name="stage")
    stop = asyncio.create_task(bench.wait_for_stop(), name="stop")
    until = asyncio.FIRST_COMPLETED
    while not stage.done():
        await asyncio.wait((stage, stop), timeout=UPDATE_SECONDS, return_when=until)
        if stop.done():
            stage.cancel()
            await asyncio.wait((stage,))
        now = (driver.started, client.in_flight, time.process_time() - cpu)
        bench.send(Observed(driver.outcomes, driver.pulses, *now))
        driver.outcomes, driver.pulses = [], []
    client.close()
    if not stage.cancelled():
        stage.result()
    bench.send(None)


async def _serve(connection: socket.socket) -> None:
    bench = await _Channel.over(connection)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the bench has ended
        await _send_shard(bench)
    await bench.close()


if __name__ == "__main__":
    uvloop.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
