"""One engine process is watched fairly, and what it said counts once."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.busy_loops import busy_loops, counts_waits, crowded_core, run_for
from tests.support.waiting import until
from worker.config import EngineConfig
from worker.engine.messages import FromEngine, Heartbeat, StepOutputs
from worker.engine.process.child import EngineChild
from worker.engine.process.client import EngineClient
from worker.engine.process.supervision import Supervision
from worker.errors import WorkerError
from worker.types import EngineStats, SchedulerCounters

PATIENCE_SECONDS = 240.0
PATIENT = Supervision(heartbeat_timeout_seconds=60.0)
STALLED = Heartbeat(stalled_seconds=9.0, budget_seconds=1.0)


@asynccontextmanager
async def child_of(
    receive: Callable[[FromEngine], None] = lambda message: None, supervision: Supervision = PATIENT
) -> AsyncIterator[EngineChild]:
    child = EngineChild(EngineConfig("sim", None), supervision, receive)
    await child.spawn()
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            yield child
        finally:
            await child.close(0.0)


class Engine:
    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._sockets = []
        for name in ("engine", "beats"):
            socket = self._context.socket(zmq.PAIR)
            socket.linger = 1000
            socket.connect(f"ipc://{directory}/{name}.sock")
            self._sockets.append(socket)

    def say(self, *messages: FromEngine) -> None:
        for message in messages:
            socket = self._sockets[isinstance(message, Heartbeat)]
            socket.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


def replace_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))


class Mute:
    """A child whose process is replaced by a sleeper: only the test speaks for the engine."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_engine(path, monkeypatch, "sleep 1000")
        monkeypatch.setattr("tempfile.tempdir", str(path))
        self._path = path

    def engine(self) -> Engine:
        (directory,) = self._path.glob("pointsman-*")
        return Engine(directory)


@pytest.fixture
def mute(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mute:
    return Mute(short_path, monkeypatch)


async def test_only_the_newest_of_a_backlog_of_heartbeats_counts(mute: Mute) -> None:
    """The parent was stopped: an earlier stall that is over is no reason to kill."""
    async with child_of() as child:
        now = time.monotonic()
        stalled = msgspec.structs.replace(STALLED, sent_seconds=now)
        # Of the same context: what is sent is there.
        with child._context.socket(zmq.PAIR) as engine:
            child._beats._socket.bind("inproc://beats")
            engine.connect("inproc://beats")
            well = Heartbeat(stalled_seconds=0.5, budget_seconds=1.0, sent_seconds=now)
            for beat in [*[stalled] * 100, well]:
                engine.send(msgspec.msgpack.encode(beat))
            await until(lambda: child.stalled_seconds == 0.5)
        assert not child.lost.done()


async def test_an_old_heartbeat_kills_no_engine_and_a_fresh_one_does(
    mute: Mute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.process.child._NEWS_SECONDS", PATIENCE_SECONDS)
    async with child_of() as child:
        engine = mute.engine()
        long_ago = time.monotonic() - PATIENCE_SECONDS
        engine.say(msgspec.structs.replace(STALLED, sent_seconds=long_ago))
        await until(lambda: child.stalled_seconds > 0.0)
        assert not child.lost.done()
        engine.say(msgspec.structs.replace(STALLED, sent_seconds=time.monotonic()))
        assert "beyond its budget" in await child.lost
        engine.close()


ENDLESS = """
import sys, time
from worker.engine.process.heartbeat import HeartbeatThread, Pulse, StepBudget
began = time.monotonic()
pulse = Pulse(StepBudget(0.5, 4.0))
pulse.follow(lambda: (began, 1))
pulse.working()
HeartbeatThread(sys.argv[-1], pulse).start()
while True:
    pass
"""


async def test_an_endless_step_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses up its budget by running, as one that hangs does by sleeping."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    replace_engine(tmp_path, monkeypatch, f'env PYTHONPATH=. {sys.executable} {script} "$@"')
    async with child_of() as child:
        assert "beyond its budget of 0.5 s" in await child.lost


@pytest.mark.skipif(not counts_waits(), reason="the kernel keeps no sums of waits")
async def test_silence_of_an_engine_that_waits_for_a_core_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares a core with others: by the time that it has run for less than the timeout, it has
    been silent for several times as long.
    """
    loop = f"import os; os.sched_setaffinity(0, {{{crowded_core()}}})\nwhile True: pass"
    with busy_loops(9):
        replace_engine(tmp_path, monkeypatch, f"{sys.executable} -Sc '{loop}'")
        async with child_of(supervision=Supervision(startup_silence_seconds=0.8)) as child:
            await asyncio.to_thread(run_for, child.pid, 0.3)
            assert not child.lost.done()


async def test_messages_of_a_lost_engine_are_discarded(mute: Mute) -> None:
    """Its counters were added up when it was lost; a message that comes later would count twice."""
    received: list[FromEngine] = []
    async with child_of(received.append) as child:
        engine = mute.engine()
        steps = [
            StepOutputs([], EngineStats(scheduler=SchedulerCounters(num_steps=n)), n)
            for n in range(1, 101)
        ]
        engine.say(*steps)
        await until(lambda: len(received) > 0)
        child.kill("enough")
        at_loss = len(received)
        assert await child.lost == "enough"
        engine.say(*steps)
        engine.close()
        child._main.drain(at_once=None)
        assert len(received) == at_loss
        assert received == steps[:at_loss]


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    path = tmp_path / ("d" * 100)
    path.mkdir()
    return path


async def test_a_directory_too_deep_for_sockets_is_an_error_and_no_hang(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = EngineClient(EngineConfig("sim", None))
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(WorkerError, match="cannot be started"):
            await client.start()
    assert os.listdir(deep) == []
    assert not client.is_alive


async def test_an_engine_that_cannot_be_started_again_is_given_up(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(EngineConfig("sim", None), None, Supervision(max_restarts=1))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.start()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        os.kill(client.pid, signal.SIGKILL)
        await client.gone()
        await client.shutdown()
