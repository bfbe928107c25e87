"""The engine's client in the HTTP process: it turns requests into token streams.

When the child process dies, hangs or stalls, every open stream ends with an error at once, and a
new one is started in its place, as `Supervision` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from worker.config import EngineConfig
from worker.engine.control import MEMORY_TAGS
from worker.engine.messages import (
    AbortRequests,
    AddRequest,
    Command,
    CommandReply,
    EngineReady,
    FromEngine,
    Pause,
    RequestOutput,
    Resume,
    Sleep,
    StepOutputs,
    Vocabulary,
    WakeUp,
)
from worker.engine.process.child import EngineChild
from worker.engine.process.supervision import RestartBudget, Supervision, add_counters, counters_of
from worker.errors import EngineDeadError, WorkerError
from worker.types import EngineStats, FinishReason


def merge(*outputs: RequestOutput) -> RequestOutput:
    """Merge consecutive outputs of a sequence: tokens and log probabilities in order, the steps
    added up, the rest from the last one.
    """
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=[token_id for one in outputs for token_id in one.token_ids],
        logprobs=[entry for one in outputs for entry in one.logprobs],
        prompt_logprobs=[entry for one in outputs for entry in one.prompt_logprobs],
        num_steps=sum(one.num_steps for one in outputs if one.token_ids) or 1,
    )


@dataclass(slots=True)
class RequestStream:
    """Hands one sequence's outputs from the engine's socket to the task that awaits them.

    At most one output is queued: a consumer that lags gets the outputs it missed as one. One
    consumer at a time. `on_close` is called when the consumer closes the stream before its last
    output has come.
    """

    request_id: str
    on_close: Callable[[RequestStream], None]
    finished: bool = False
    _closed: bool = False
    _pending: RequestOutput | None = None
    _error: EngineDeadError | None = None
    _waiter: asyncio.Future[None] | None = field(default=None, repr=False)

    def push(self, output: RequestOutput) -> None:
        # Merged, so that a slow reader takes no more memory than its own tokens.
        self._pending = output if self._pending is None else merge(self._pending, output)
        self.finished = output.finish_reason is not None
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """End the stream: whatever was received is still handed out, then `error` is raised."""
        self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        """Return new output. Raises EngineDeadError once the engine is gone and all was taken."""
        while True:
            if self._pending is not None:
                output, self._pending = self._pending, None
                return output
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.finished and self._error is None:
            self.on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


logger = logging.getLogger(__name__)

T = TypeVar("T")
StepObserver = Callable[[StepOutputs], None]
SleepObserver = Callable[[float], None]


class EngineClient:
    """Owns the engine, every open stream and the counters of engines that died. Lives on one event
    loop; `worker.api.generate.engine.Engine` is what the API sees of it.

    `on_step` is called on the event loop with every message of the engine's steps, `on_sleep` with
    the seconds that each sleep or wake-up took; they must be quick. What they raise is logged and
    otherwise ignored. An engine that is started again pauses and sleeps as the one before it did.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: StepObserver | None = None,
        supervision: Supervision = Supervision(),  # noqa: B008 (frozen)
        on_sleep: SleepObserver | None = None,
    ) -> None:
        self._config = config
        self._on_step = on_step
        self._on_sleep = on_sleep
        self._supervision = supervision
        self._budget = RestartBudget(supervision)
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._why_down: str | None = "the engine has not been started"
        self._gone = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._replies: dict[int, asyncio.Future[CommandReply]] = {}
        self._command_ids = itertools.count(1)
        self._asked: dict[int, tuple[Command, float]] = {}  # unanswered, and since when
        self._halts = Halts()
        self._stats = EngineStats()
        self._past = EngineStats()  # the counters of engines that died
        self._num_restarts = 0
        self._why_aborted: str | None = None
        self._vocabulary: Vocabulary | None = None

    # ---- state that others read -------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self._why_down is None

    @property
    def is_progressing(self) -> bool:
        return self.is_alive and self.stalled_seconds == 0.0

    @property
    def stalled_seconds(self) -> float:
        return 0.0 if self._child is None else self._child.stalled_seconds

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def num_unfinished(self) -> int:
        """The number of sequences that were sent and have not ended, whether running or not."""
        return len(self._streams)

    @property
    def stats(self) -> EngineStats:
        """The latest counters, those of dead engines included, with the queue as it is now.

        Requests sent since the engine's last report count as waiting, and requests that ended no
        longer count as running, so running + waiting is always `num_unfinished`.
        """
        running = min(self._stats.num_running, len(self._streams))
        waiting = len(self._streams) - running
        return msgspec.structs.replace(
            add_counters(self._past, self._stats),
            num_running=running,
            num_waiting=waiting,
            num_deferred=min(self._stats.num_deferred, waiting),
            num_restarts=self._num_restarts,
            stalled_seconds=self.stalled_seconds,
        )

    @property
    def num_waiting_reported(self) -> int:
        """The number of requests that waited when the engine last reported, of those it knew."""
        return self._stats.num_waiting

    # ---- life -------------------------------------------------------------------------------

    async def start(self, timeout_seconds: float | None = None) -> EngineReady:
        """Spawn the engine and wait until it can serve.

        Raises WorkerError with the engine's own words when it cannot start, TimeoutError when it
        takes longer than `timeout_seconds`. Nothing is left behind when it raises.
        """
        child = self._child = self._new_child(self._config)
        try:
            async with asyncio.timeout(timeout_seconds):
                ready = await _bring_up(child)
        except BaseException:
            await self.shutdown(0.0)
            raise
        self._why_down = None
        self._supervisor = asyncio.create_task(self._supervise(child, ready), name="engine-life")
        return ready

    async def gone(self) -> None:
        """Wait until the engine is lost for good: it died, and is not started again."""
        await self._gone.wait()

    async def shutdown(self, timeout_seconds: float = 5.0) -> None:
        """End the engine: ask, wait, then kill. Idempotent. Open streams raise EngineDeadError."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._lose("the engine was shut down")
        child, self._child = self._child, None
        if child is not None:
            await child.close(timeout_seconds)

    def describe(self, vocabulary: Vocabulary) -> None:
        """Send the vocabulary to this engine and to its successors. Called once, after `start`."""
        self._vocabulary = vocabulary
        if self._child is not None:
            self._child.send(vocabulary)

    # ---- requests ---------------------------------------------------------------------------

    def open(self, request: AddRequest) -> tuple[RequestStream, ...]:
        """Send a request; return one stream for it and one for each of its branches, in order.

        The caller closes every stream. Raises `EngineDeadError`, and `WorkerError` when an id is in
        use; nothing is left open when it raises.
        """
        child = self._living()
        ids = [request.request_id, *request.branch_ids]
        taken = [i for n, i in enumerate(ids) if i in self._streams or i in ids[:n]]
        if taken:
            raise WorkerError(f"request id {taken[0]!r} is in use")
        streams = tuple(RequestStream(i, self._close) for i in ids)
        self._streams.update(zip(ids, streams, strict=True))
        try:
            child.send(request)
        except BaseException:  # it cannot be encoded: the engine will never report its end
            for request_id in ids:
                del self._streams[request_id]
            raise
        return streams

    async def run(self, command: Command) -> CommandReply:
        """Send a command and return its reply; its id is replaced. Raises `EngineDeadError`."""
        child = self._living()
        number = next(self._command_ids)
        reply: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._asked[number] = (command, time.monotonic())
        try:
            child.send(msgspec.structs.replace(command, command_id=number))
            return await reply
        finally:
            self._replies.pop(number, None)

    def abort(self, request_id: str) -> None:
        """Stop a sequence: its stream ends with `FinishReason.ABORT`. Unknown ids are ignored."""
        if request_id in self._streams and self._child is not None:
            self._child.send(AbortRequests([request_id]))

    def hand_over(self, request_id: str) -> None:
        """Stop a sequence that continues elsewhere with its KV; its stream falls silent."""
        if self._streams.pop(request_id, None) is not None and self._child is not None:
            self._child.send(AbortRequests([request_id], hands_over=True))

    def abort_all(self, reason: str) -> None:
        """Stop every sequence; from now on `RequestOutput.error` of an abort gives `reason`."""
        self._why_aborted = reason
        if self._streams and self._child is not None:
            self._child.send(AbortRequests(list(self._streams)))

    def _new_child(self, config: EngineConfig) -> EngineChild:
        return EngineChild(config, self._supervision, self._receive)

    def _living(self) -> EngineChild:
        if self._why_down is not None or self._child is None:
            raise EngineDeadError(self._why_down or "the engine has not been started")
        return self._child

    def _close(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None and self._child is not None:
            self._child.send(AbortRequests([stream.request_id]))

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._stats = message.stats
            for output in message.outputs:
                self._deliver(output)
            self._observe(self._on_step, message)
        elif isinstance(message, CommandReply):
            self._note(message)
            reply = self._replies.get(message.command_id)
            if reply is not None and not reply.done():
                reply.set_result(message)

    def _note(self, reply: CommandReply) -> None:
        """Remember what the engine has done, whether or not a caller still waits for the reply."""
        command, asked_seconds = self._asked.pop(reply.command_id, (None, 0.0))
        if command is None or not reply.ok:
            return
        self._halts.note(command)
        if isinstance(command, Sleep | WakeUp):
            self._observe(self._on_sleep, time.monotonic() - asked_seconds)

    def _observe(self, observer: Callable[[T], None] | None, seen: T) -> None:
        if observer is None:
            return
        try:
            observer(seen)
        except Exception:  # raised on, it would leave the socket undrained and every stream stuck
            logger.exception("an observer of the engine failed")

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # closed here while the engine was still at it
        if output.finish_reason is FinishReason.ABORT and self._why_aborted is not None:
            output = msgspec.structs.replace(output, error=self._why_aborted)
        stream.push(output)
        if stream.finished:
            del self._streams[output.request_id]

    async def _supervise(self, child: EngineChild, ready: EngineReady) -> None:
        # The front end has published how long a sequence may be: the next engine keeps to it.
        config = dataclasses.replace(self._config, num_blocks_override=ready.num_blocks)
        try:
            while True:
                reason = await asyncio.shield(child.lost)
                lost_at = time.monotonic()
                self._lose(f"the engine was lost: {reason}")
                await child.close()
                delay = self._budget.take(lost_at)
                if delay is None:
                    logger.error("the engine is gone for good: %s", reason)
                    return
                logger.error("starting a new engine in %g s: %s", delay, reason)
                await asyncio.sleep(delay)
                self._num_restarts += 1
                child = self._child = self._new_child(config)
                with contextlib.suppress(WorkerError):  # reported and handled at the next turn
                    await _bring_up(child)
                    if self._vocabulary is not None:
                        child.send(self._vocabulary)
                    for command in self._halts.commands():  # before any request
                        child.send(command)
                    self._why_down = None
                    logger.warning("a new engine serves after %.1f s", time.monotonic() - lost_at)
        finally:
            self._gone.set()

    def _lose(self, reason: str) -> None:
        self._why_down = reason
        self._past = counters_of(add_counters(self._past, self._stats))
        self._stats = EngineStats(
            sleep_level=self._halts.sleep_level, is_paused=self._halts.is_halted
        )
        self._asked.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(reason))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(reason))


async def _bring_up(child: EngineChild) -> EngineReady:
    """Spawn an engine; wait until it serves. Raises WorkerError with the engine's own words."""
    await child.spawn()
    either: set[asyncio.Future[Any]] = {child.ready, child.lost}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if child.lost.done():
        raise WorkerError(child.lost.result())
    return child.ready.result()


class Halts:
    def __init__(self) -> None:
        self._is_paused = False
        self._sleep_level: int | None = None
        self._woken: frozenset[str] = frozenset()  # tags that a sleeper has back already

    @property
    def sleep_level(self) -> int | None:
        return self._sleep_level

    @property
    def is_halted(self) -> bool:
        return self._is_paused or self._sleep_level is not None

    def note(self, command: Command) -> None:
        match command:
            case Pause():
                self._is_paused = True
            case Resume():
                self._is_paused = False
            case Sleep(level=level):
                self._sleep_level = max(self._sleep_level or 0, level)
                if level > 0:
                    self._woken = frozenset()
            case WakeUp(tags=tags):
                self._woken |= MEMORY_TAGS if tags is None else frozenset(tags)
                if not self._sleep_level or self._woken >= MEMORY_TAGS:
                    self._sleep_level, self._woken = None, frozenset()

    def commands(self) -> list[Command]:
        """Return the commands that bring a new engine to the last one's state, with id 0."""
        commands: list[Command] = []
        if self._is_paused:
            commands.append(Pause(0, "keep"))
        if self._sleep_level is not None:
            commands.append(Sleep(0, self._sleep_level, "keep"))
        if self._woken:
            commands.append(WakeUp(0, sorted(self._woken)))
        return commands
