"""The engine as the HTTP process sees it: a child process that turns requests into token streams.

The child is reached over one ZMQ pair on a unix socket in a private directory. The raw socket's
file descriptor is watched by the event loop: half the CPU of `zmq.asyncio`, at the price of its
edge-triggered readiness, so whoever touches the socket must drain it (`_drain`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

import msgspec
import zmq

from worker.config import EngineConfig
from worker.engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    CommandReply,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from worker.engine.stream import RequestStream
from worker.errors import EngineDeadError, WorkerError

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 32

StepObserver = Callable[[StepOutputs], None]


class EngineClient:
    """Owns the engine process and every open request stream. Lives on one event loop.

    `start` once, `generate` any number of times at once, `shutdown` once. `on_step` is called on
    the event loop with every message of the engine's steps; it must be quick. What it raises is
    logged and otherwise ignored.
    """

    def __init__(self, config: EngineConfig, on_step: StepObserver | None = None) -> None:
        self._config = config
        self._on_step = on_step
        self._streams: dict[str, RequestStream] = {}
        self._replies: dict[int, asyncio.Future[CommandReply]] = {}
        self._command_ids = itertools.count(1)
        self._stats = EngineStats()
        self._last_step_seconds: float | None = None
        self._ready: asyncio.Future[EngineReady] | None = None
        self._dead: EngineDeadError | None = None
        self._process: Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._directory: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    # ---- state that others read -------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """The engine is up and can take requests."""
        return self._dead is None and self._ready is not None and self._ready.done()

    @property
    def is_progressing(self) -> bool:
        """Alive, and the engine's current step is within its budget."""
        return self.is_alive

    @property
    def pid(self) -> int | None:
        """The engine's process id, while there is such a process."""
        return None if self._process is None else self._process.pid

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and have not ended: running, waiting, or on their way."""
        return len(self._streams)

    @property
    def last_step_seconds(self) -> float | None:
        """`time.monotonic()` when the engine last reported a step; None before the first.

        With `num_unfinished` > 0, an old value means a step that hangs.
        """
        return self._last_step_seconds

    @property
    def stats(self) -> EngineStats:
        """The engine's latest counters, with the queue as it is now.

        The engine reports after each step; requests sent since then wait, and requests that ended
        run no more, so running + waiting is always `num_unfinished`.
        """
        running = min(self._stats.num_running, len(self._streams))
        waiting = len(self._streams) - running
        return msgspec.structs.replace(self._stats, num_running=running, num_waiting=waiting)

    @property
    def num_waiting_reported(self) -> int:
        """Requests that waited when the engine reported last; it knew nothing of later ones."""
        return self._stats.num_waiting

    # ---- life -------------------------------------------------------------------------------

    async def start(self, timeout_seconds: float | None = None) -> EngineReady:
        """Spawn the engine and wait until it can serve.

        Raises WorkerError with the engine's own words when it cannot start, TimeoutError when it
        takes longer than `timeout_seconds`. Nothing is left behind when it raises.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            async with asyncio.timeout(timeout_seconds):
                address = self._bind(loop)
                await self._spawn(address)
                return await self._ready
        except EngineDeadError as error:
            await self.shutdown(0.0)
            raise WorkerError(str(error)) from None
        except BaseException:
            await self.shutdown(0.0)
            raise

    async def shutdown(self, timeout_seconds: float = 5.0) -> None:
        """End the engine: ask, wait up to `timeout_seconds`, then kill. Idempotent.

        Streams still open raise EngineDeadError.
        """
        self._die("the engine was shut down")
        process, self._process = self._process, None
        try:
            if process is not None and process.returncode is None and timeout_seconds > 0:
                self._send(Shutdown())
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_seconds):
                        await process.wait()
        finally:
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            self._release()
        if process is not None:
            await process.wait()
        if self._watcher is not None:
            await self._watcher

    # ---- requests ---------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; each output carries the tokens drawn since the one before.

        The last output has a `finish_reason`; `ERROR` comes with a text in `error`. Closing or
        cancelling the iterator before that aborts the request in the engine (use
        `contextlib.aclosing`). Raises EngineDeadError when the engine is or goes down, WorkerError
        when `request_id` is in use.
        """
        (stream,) = self.open(request)
        with closing(stream):
            while True:
                output = await stream.next()
                yield output
                if output.finish_reason is not None:
                    return

    def open(self, request: AddRequest) -> tuple[RequestStream, ...]:
        """Send a request; one stream for it and one for each of its branches, in order.

        Whoever opens closes every stream. Raises `EngineDeadError`, and `WorkerError` when an id is
        in use.
        """
        self._check_alive()
        ids = [request.request_id, *request.branch_ids]
        taken = [i for n, i in enumerate(ids) if i in self._streams or i in ids[:n]]
        if taken:
            raise WorkerError(f"request id {taken[0]!r} is in use")
        streams = tuple(RequestStream(i, self._close) for i in ids)
        self._streams.update(zip(ids, streams, strict=True))
        self._send(request)
        return streams

    async def run(self, command: Command) -> CommandReply:
        """Have a command done; its `command_id` is replaced. Raises `EngineDeadError`."""
        self._check_alive()
        number = next(self._command_ids)
        reply: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._send(msgspec.structs.replace(command, command_id=number))
            return await reply
        finally:
            del self._replies[number]

    def abort(self, request_id: str) -> None:
        """Stop a request: its stream ends with `FinishReason.ABORT`. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(AbortRequests([request_id]))

    def abort_all(self) -> None:
        """Stop every request, as `abort` does."""
        if self._streams:
            self._send(AbortRequests(list(self._streams)))

    # ---- below: private ---------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if not self.is_alive:
            raise EngineDeadError("the engine has not been started")

    def _close(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self._send(AbortRequests([stream.request_id]))

    def _send(self, message: ToEngine) -> None:
        """Hand a message to ZMQ, which never blocks here: the queue has no limit of its own, and
        what it can hold is bounded by the open requests. Without a peer the message is dropped;
        the watcher ends the streams then.
        """
        if self._socket is None:
            return
        with suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.DONTWAIT)
        # Sending may swallow the readiness edge of a message that came in meanwhile.
        if self._is_readable():
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        """Take every message there is: the descriptor signals changes, not the state.

        After `MESSAGES_AT_ONCE` other callbacks get their turn, however fast the engine is.
        """
        for _ in range(MESSAGES_AT_ONCE):
            if self._socket is None or not self._is_readable():
                return
            self._receive(self._decoder.decode(self._socket.recv(zmq.DONTWAIT)))
        asyncio.get_running_loop().call_soon(self._drain)

    def _is_readable(self) -> bool:
        assert self._socket is not None  # noqa: S101 (both callers have looked)
        return bool(cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._stats = message.stats
            self._last_step_seconds = time.monotonic()
            for output in message.outputs:
                self._deliver(output)
            self._observe(message)
        elif isinstance(message, EngineReady):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, CommandReply):
            reply = self._replies.get(message.command_id)
            if reply is not None and not reply.done():
                reply.set_result(message)
        elif isinstance(message, EngineFailed):
            self._die(message.message)
            self._send(Shutdown())  # the engine waits for this, so that its last words arrive

    def _observe(self, step: StepOutputs) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(step)
        except Exception:  # raised on, it would leave the socket undrained and every stream stuck
            logger.exception("the observer of steps failed")

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # closed here while the engine was still at it
        stream.push(output)
        if stream.finished:
            del self._streams[output.request_id]

    def _die(self, message: str) -> None:
        """Mark the engine dead, once, and fail whoever waits for it."""
        if self._dead is not None:
            return
        self._dead = EngineDeadError(message)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._dead)
            self._ready.exception()  # counts as looked at, should `start` have failed before it
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(message))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(message))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> str:
        self._directory = Path(tempfile.mkdtemp(prefix="pointsman-"))
        address = f"ipc://{self._directory}/engine.sock"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        loop.add_reader(self._socket.fileno(), self._drain)
        return address

    async def _spawn(self, address: str) -> None:
        """Start the child. Its standard input carries the config, then stays open: its end tells
        the child that we are gone, however we went.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "worker.engine.process",
            address,
            stdin=asyncio.subprocess.PIPE,
        )
        self._watcher = asyncio.create_task(self._watch(self._process), name="engine-watcher")
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 (it was asked for above)
        config = self._encoder.encode(self._config)
        stdin.write(len(config).to_bytes(4, "little") + config)
        with suppress(ConnectionError):  # the watcher reports a child that is gone already
            await stdin.drain()

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        if self._dead is None:
            logger.error("engine process %d ended with exit code %d", process.pid, code)
        self._die(f"the engine process ended with exit code {code}; see its log")

    def _release(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
