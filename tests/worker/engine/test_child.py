"""One engine process is watched fairly, and what it said counts once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from worker.config import EngineConfig
from worker.engine.child import EngineChild
from worker.engine.client import EngineClient
from worker.engine.messages import EngineStats, FromEngine, Heartbeat, StepOutputs
from worker.engine.supervision import Supervision
from worker.errors import WorkerError

PATIENCE_SECONDS = 60.0
PATIENT = Supervision(heartbeat_timeout_seconds=60.0)
STALLED = Heartbeat(stalled_seconds=9.0, budget_seconds=1.0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so, for a minute at most."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)


class Engine:
    """The engine's end of both sockets, in the hands of the test."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._sockets = []
        for name in ("engine", "beats"):
            socket = self._context.socket(zmq.PAIR)
            socket.linger = 1000
            socket.connect(f"ipc://{directory}/{name}.sock")
            self._sockets.append(socket)

    def say(self, *messages: FromEngine) -> None:
        """Queue messages on the socket each belongs to."""
        for message in messages:
            socket = self._sockets[isinstance(message, Heartbeat)]
            socket.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Leave; what is queued is delivered first."""
        for socket in self._sockets:
            socket.close()
        self._context.term()


class Mute:
    """A child whose process is replaced by a sleeper: only the test speaks for the engine."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sleeper = tmp_path / "sleeper"
        sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
        sleeper.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(sleeper))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        self._tmp_path = tmp_path

    def engine(self) -> Engine:
        """Connect to the one child that runs."""
        (directory,) = self._tmp_path.glob("pointsman-*")
        return Engine(directory)


@pytest.fixture
def mute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mute:
    """Processes that say nothing themselves."""
    return Mute(tmp_path, monkeypatch)


async def test_of_a_backlog_of_heartbeats_only_the_newest_is_judged(mute: Mute) -> None:
    """We were stopped for a while: what was wrong then and is well now is no reason to kill."""
    child = EngineChild(EngineConfig("sim", None), PATIENT, lambda message: None)
    await child.spawn()
    engine = mute.engine()
    now = time.monotonic()
    stalled = msgspec.structs.replace(STALLED, sent_seconds=now)
    engine.say(*[stalled] * 100, Heartbeat(sent_seconds=now))
    engine.close()  # everything has left our side before the loop runs again
    await until(lambda: child._heard)
    assert not child.lost.done()
    assert child.stalled_seconds == 0.0
    await child.close(0.0)


async def test_an_old_heartbeat_kills_nobody_and_a_fresh_one_does(mute: Mute) -> None:
    """A stall is judged by what is so now."""
    child = EngineChild(EngineConfig("sim", None), PATIENT, lambda message: None)
    await child.spawn()
    engine = mute.engine()
    engine.say(msgspec.structs.replace(STALLED, sent_seconds=time.monotonic() - 5.0))
    await until(lambda: child.stalled_seconds > 0.0)
    assert not child.lost.done()
    engine.say(msgspec.structs.replace(STALLED, sent_seconds=time.monotonic()))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert "beyond its budget" in await child.lost
    engine.close()
    await child.close(0.0)


async def test_nothing_that_a_lost_engine_said_is_received_any_more(mute: Mute) -> None:
    """Its counters were added up when it was lost; a message that comes later would count twice."""
    received: list[FromEngine] = []
    child = EngineChild(EngineConfig("sim", None), PATIENT, received.append)
    await child.spawn()
    engine = mute.engine()
    steps = [StepOutputs([], EngineStats(generation_tokens=n), n) for n in range(1, 101)]
    engine.say(*steps)
    await until(lambda: len(received) > 0)
    child.kill("enough")
    at_loss = len(received)
    assert await child.lost == "enough"
    engine.say(*steps)
    engine.close()
    main = child._main
    assert main is not None
    main.drain(at_once=None)
    assert len(received) == at_loss
    assert received == steps[:at_loss]
    await child.close(0.0)


async def test_a_directory_too_deep_for_sockets_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails with a reason, and everything that was opened is closed."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = EngineClient(EngineConfig("sim", None))
    async with asyncio.timeout(10.0):
        with pytest.raises(WorkerError, match="cannot be started"):
            await client.start()
    assert list(deep.iterdir()) == []
    assert not client.is_alive


async def test_an_engine_that_cannot_be_started_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system refuses: the client says that it is gone, after its last attempt."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    client = EngineClient(EngineConfig("sim", None), None, Supervision(max_restarts=1))
    async with asyncio.timeout(60.0):
        await client.start()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await client.gone()
        await client.shutdown()
