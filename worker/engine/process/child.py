"""One life of the engine process: its sockets, its signs of life, its end.

The process is reached over ZMQ pairs on unix sockets in a private directory, one of them for
heartbeats. The event loop watches the raw file descriptors: half the CPU of `zmq.asyncio`, but
edge-triggered, so code that touches a socket must drain it (`_Inbox.drain`).
"""

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import zmq

from worker.config import EngineConfig
from worker.engine.messages import (
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    Shutdown,
    ToEngine,
)
from worker.engine.process.heartbeat import Threads, read_threads, starved_seconds
from worker.engine.process.supervision import Supervision
from worker.errors import WorkerError

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 32
EXIT_SECONDS = 5.0
REAP_SECONDS = 10.0  # from SIGKILL to the end of a process
_TICKS = 8  # in one heartbeat timeout
_NEWS_SECONDS = 1.0  # a heartbeat is sent five times a second


class EngineChild:
    """Owns one engine process from `spawn` to `close`. Lives on one event loop.

    `receive` is called with every message but heartbeats. `ready` and `lost` are futures; `lost` is
    set when the process ends, fails, falls silent, or has a step far beyond its budget.
    """

    def __init__(
        self, config: EngineConfig, supervision: Supervision, receive: Callable[[FromEngine], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.stalled_seconds = 0.0
        self._config = config
        self._supervision = supervision
        self._receive = receive
        self._process: Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._directory: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._main: _Inbox | None = None
        self._beats: _Inbox | None = None
        self._has_received = False
        self._silent_seconds = 0.0
        self._ticked = 0.0
        self._threads: Threads | None = None  # of the process, at the last tick, while it is silent
        self._ticker: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Start the process. Its standard input carries the config, then stays open as a life line.
        Raises WorkerError if the process cannot be started, which `lost` reports as well.
        """
        try:
            process = self._process = await self._started()
        except (OSError, zmq.ZMQError) as error:  # no memory, no process, no file descriptor
            reason = f"the engine process cannot be started: {error}"
            self._lose(reason)
            raise WorkerError(reason) from error
        self._watcher = asyncio.create_task(self._watch(process), name="engine-watcher")
        self._tick()
        stdin = process.stdin
        assert stdin is not None  # noqa: S101 (it was asked for above)
        config = self._encoder.encode(self._config)
        stdin.write(len(config).to_bytes(4, "little") + config)
        with suppress(ConnectionError):  # the watcher reports a process that is gone already
            await stdin.drain()

    def send(self, message: ToEngine) -> None:
        """Queue a message; open requests bound the queue. Dropped when the process is gone."""
        if self._main is not None:
            self._main.send(self._encoder.encode(message))

    def kill(self, reason: str) -> None:
        """End the process now; `lost` reports `reason`, after what the process had sent."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._take_rest()
        self._lose(reason)

    async def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """End the process: ask, wait up to `timeout_seconds`, then kill; one that has not come up
        is killed at once. Idempotent.
        """
        self._lose("the engine was shut down")
        process, self._process = self._process, None
        is_up = self.ready.done() and process is not None and process.returncode is None
        try:
            if process is not None and is_up and timeout_seconds > 0:
                self.send(Shutdown())
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_seconds):
                        await process.wait()
        finally:
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            self._release()
        await self._reap(process)

    async def _started(self) -> Process:
        self._directory = Path(tempfile.mkdtemp(prefix="pointsman-"))
        self._context = zmq.Context()
        self._main = _Inbox(self._context, self._directory / "engine.sock", self._take)
        self._beats = _NewestInbox(self._context, self._directory / "beats.sock", self._take_beat)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # -P: never import a folder of the current directory that has our package's name.
            *("-P", "-m", "worker.engine.process"),
            self._main.address,
            self._beats.address,
            stdin=asyncio.subprocess.PIPE,
        )

    def _take_beat(self, beat: FromEngine) -> None:
        self._has_received = True
        if self.ready.done():  # both sockets are connected: nothing needs their names any more
            self._remove_directory()
        if not isinstance(beat, Heartbeat):
            return
        self.stalled_seconds = beat.stalled_seconds
        # After this process was stopped or starved itself, earlier signs of life say nothing.
        is_news = time.monotonic() - beat.sent_seconds < _NEWS_SECONDS
        if is_news and beat.stalled_seconds > beat.budget_seconds:
            self.kill(
                f"a step has run {beat.stalled_seconds:.1f} s beyond its budget of"
                f" {beat.budget_seconds:.1f} s"
            )

    def _take(self, payload: FromEngine) -> None:
        self._has_received = True
        if self.lost.done():
            return  # its counters have been added up, its streams have ended
        if isinstance(payload, EngineReady):
            if not self.ready.done():
                self.ready.set_result(payload)
                self._tick()  # from now on at the pace of an engine that serves
            self._receive(payload)
        elif isinstance(payload, EngineFailed):
            self._lose(payload.message)
            self.send(Shutdown())  # the engine waits for this, so that its last words arrive
        else:
            self._receive(payload)

    def _take_rest(self) -> None:
        if self._main is not None and not self.lost.done():
            self._main.drain(at_once=None)

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        """Add up the silence, counting at most a tick's length for each tick: when this process was
        stopped or starved itself, the time that passed says nothing about the engine. Neither does
        the time in which the engine waited for a core.
        """
        if self._ticker is not None:
            self._ticker.cancel()
        limits = self._supervision
        seconds = limits.heartbeat_timeout_seconds
        if not self.ready.done():
            seconds = limits.startup_silence_seconds
        if self._beats is not None:
            self._beats.drain()
        tick_seconds = seconds / _TICKS
        self._count_silence(tick_seconds)
        # On a quiet machine, too, threads wait for a millisecond now and then.
        if self._silent_seconds > seconds - tick_seconds / 2:
            self.kill(f"the engine process gave no sign of life for {seconds:g} s")
        elif not self.lost.done():
            loop = asyncio.get_running_loop()
            self._ticker = loop.call_later(tick_seconds, self._tick)

    def _count_silence(self, tick_seconds: float) -> None:
        now = time.monotonic()
        elapsed, self._ticked = now - self._ticked, now
        has_received, self._has_received = self._has_received, False
        if has_received or self.pid is None:
            self._silent_seconds, self._threads = 0.0, None
            return
        before, self._threads = self._threads, read_threads(f"/proc/{self.pid}/task")
        counted = elapsed - starved_seconds(elapsed, before, self._threads)
        self._silent_seconds += min(tick_seconds, counted)

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        self._take_rest()
        if not self.lost.done():
            logger.error("engine process %d ended with exit code %d", process.pid, code)
        self._lose(f"the engine process ended with exit code {code}; see its log")

    async def _reap(self, process: Process | None) -> None:
        """Wait for the end of a process that was killed, but not for ever: one that is stuck in a
        device's driver does not die before it comes out of there.
        """
        if self._watcher is None:
            return
        done, _ = await asyncio.wait([self._watcher], timeout=REAP_SECONDS)
        if not done and process is not None:
            logger.error("engine process %d was killed, but does not end", process.pid)
            self._watcher.cancel()

    def _release(self) -> None:
        for inbox in (self._main, self._beats):
            if inbox is not None:
                inbox.close()
        self._main = self._beats = None
        if self._context is not None:
            self._context.destroy(linger=0)  # unlike `term` it never waits for an open socket
            self._context = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


class _Inbox:
    """Our end of a ZMQ pair, drained by the event loop. A ZMQError leaves nothing open."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        take: Callable[[FromEngine], None],
    ) -> None:
        self.address = f"ipc://{path}"
        self._take = take
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        socket = context.socket(zmq.PAIR)
        try:
            # No limit, so that sending never blocks: open requests bound the queue.
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(self.address)
            self._loop.add_reader(socket.fileno(), self.drain)
        except BaseException:
            socket.close(linger=0)
            raise
        self._socket: zmq.Socket[bytes] | None = socket

    def send(self, payload: bytes) -> None:
        if self._socket is None:
            return
        with suppress(zmq.Again):
            self._socket.send(payload, zmq.DONTWAIT)
        # Sending may swallow the readiness edge of a message that came in meanwhile.
        if self._is_readable(self._socket):
            self._loop.call_soon(self.drain)

    def drain(self, at_once: int | None = MESSAGES_AT_ONCE) -> None:
        """Take every message there is: the descriptor signals changes, not the state.

        Other callbacks get their turn after `at_once` messages. None: take all of them now, which
        is safe only for messages of a dead engine.
        """
        num_taken = 0
        while (payload := self._next()) is not None:
            self._take(self._decoder.decode(payload))
            num_taken += 1
            if num_taken == at_once:
                self._loop.call_soon(self.drain)
                return

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self._loop.remove_reader(socket.fileno())
            socket.close()

    def _next(self) -> bytes | None:
        if self._socket is None or not self._is_readable(self._socket):
            return None
        return self._socket.recv(zmq.DONTWAIT)

    def _is_readable(self, socket: zmq.Socket[bytes]) -> bool:
        return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)


class _NewestInbox(_Inbox):
    """An inbox for messages of which the newest says everything: the others are dropped."""

    def drain(self, at_once: int | None = None) -> None:
        newest = None
        while (payload := self._next()) is not None:
            newest = payload
        if newest is not None:
            self._take(self._decoder.decode(newest))
