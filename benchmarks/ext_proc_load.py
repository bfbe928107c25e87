"""HTTP/1.1 load at a small cost for its sender: arrivals on a clock, or as fast as answers come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

SETTLE_SECONDS = 20.0  # how late an answer may be


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when to send it (seconds from the start) and its bytes."""

    at_seconds: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request. Seconds from its due time to the last byte."""

    status: int = 0
    seconds: float = 0.0
    error: str = ""


class _Connection(asyncio.Protocol):
    """One persistent connection with at most one request on it; reports each end."""

    def __init__(self, done: Callable[[_Connection, Answer], None]) -> None:
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._due: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, payload: bytes, due: float) -> None:
        assert self._transport is not None
        self._due = due
        self._transport.write(payload)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        due, self._due = self._due, None
        if due is not None:
            status = self._parser.get_status_code()
            self._done(self, Answer(status, time.perf_counter() - due))

    def connection_lost(self, error: Exception | None) -> None:
        due, self._due = self._due, None
        if due is not None:
            self._done(self, Answer(error=str(error or "closed")))


async def drive(shots: Sequence[Shot], host: str, port: int) -> list[Answer]:
    """Send every shot at its time, answered or not; all answers, lost ones included."""
    loop = asyncio.get_running_loop()
    free: list[_Connection] = []
    every: list[_Connection] = []
    answers: list[Answer] = []
    finished = asyncio.Event()

    def done(connection: _Connection, answer: Answer) -> None:
        if answer.status:
            free.append(connection)
        answers.append(answer)
        if len(answers) == len(shots):
            finished.set()

    async def another() -> _Connection:
        _, connection = await loop.create_connection(lambda: _Connection(done), host, port)
        every.append(connection)
        return connection

    begun = time.perf_counter()
    for shot in shots:
        pause = begun + shot.at_seconds - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        connection = free.pop() if free else await another()
        connection.send(shot.payload, begun + shot.at_seconds)
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await finished.wait()
    except TimeoutError:
        answers += [Answer(error="no answer in time")] * (len(shots) - len(answers))
    for connection in every:
        connection.close()
    return answers


async def saturate(
    shots: Sequence[Shot], host: str, port: int, connections: int, seconds: float
) -> tuple[int, list[float]]:
    """Keep `connections` busy; answers with status 200 and their seconds."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    failures: list[Answer] = []
    state = {"next": 0, "on": True}

    def done(connection: _Connection, answer: Answer) -> None:
        if answer.status == 200:
            latencies.append(answer.seconds)
        else:
            failures.append(answer)
        if state["on"] and answer.status:
            again(connection)

    def again(connection: _Connection) -> None:
        state["next"] = (state["next"] + 1) % len(shots)
        connection.send(shots[state["next"]].payload, time.perf_counter())

    made = []
    for _ in range(connections):
        _, connection = await loop.create_connection(lambda: _Connection(done), host, port)
        made.append(connection)
        again(connection)
    await asyncio.sleep(seconds)
    state["on"] = False
    for connection in made:
        connection.close()
    assert not failures, failures[:3]
    return len(latencies), latencies
