"""Runs one stream: messages in, machine, director, messages out. Knows no transport.

A transport gives `serve_stream` two callables, one that reads a message (None: the proxy closed its
side) and one that writes one, and cancels it when the proxy resets the stream.

Most decisions are made without waiting for anything, right where the request has become complete.
One that has to wait runs in a task of its own, owned by the stream's task group, and the stream is
read on meanwhile, so that a client that leaves cancels its request. A lock keeps the replies of one
step together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar

from picker.errors import Code, DropReason, PickerError, RefusedError
from picker.extproc import wire
from picker.extproc.messages import Action, CancelRoute, Closed, Ending, Finish, Route, SendPatience
from picker.extproc.request_phase import Limits
from picker.extproc.stream import State, StreamMachine
from picker.rpc.calls import Read, Write
from picker.types import FinishCause, RawRequest, RouteDecision

log = logging.getLogger(__name__)

T = TypeVar("T")
Evict: TypeAlias = Callable[[DropReason], None]
# For a decision that waits. A proxy whose own bound is lower takes no notice of it at all.
PATIENCE_SECONDS = 300


class RequestExchange(Protocol):
    """One request as its owner sees it; see `requestcontrol.director.Exchange`."""

    @property
    def decides_at_once(self) -> bool:
        """Whether `route` never waits for anything; then it needs no task of its own."""
        ...

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Decide. Raises `RefusedError`; may be cancelled."""
        ...

    def finish(
        self,
        cause: FinishCause,
        response_status: int | None = None,
        served_by: str | None = None,
    ) -> None:
        """The request is over."""
        ...


class Evictable(Protocol):
    """What an exchange is besides, if its request may be stopped while it is under way."""

    def allow_eviction(self, evict: Evict) -> None:
        """Called once, before anything else.

        `evict` may be called at any time from the same event loop, more than once too; it returns
        at once. The client is then told, unless its response is already complete, and the exchange
        finishes as usual.
        """
        ...


class ExchangeSource(Protocol):
    """Opens an exchange per stream; the director."""

    def begin(self) -> RequestExchange:
        """A request has started to arrive."""
        ...


class StreamFailedError(PickerError):
    """The stream cannot go on; `peer_at_fault` says whose doing it was."""

    def __init__(self, message: str, peer_at_fault: bool) -> None:
        super().__init__(message)
        self.peer_at_fault = peer_at_fault


async def serve_stream(
    read: Read,
    write: Write,
    exchanges: ExchangeSource,
    *,
    limits: Limits,
    is_stopping: Callable[[], bool],
) -> None:
    """Serve one stream to its end.

    Whatever ends it, the exchange is finished exactly once. Returns when the proxy closed the
    stream or everything has been said (a refusal, a response that is none of ours); raises
    `StreamFailedError` when the stream is to be aborted.
    """
    await _Session(read, write, exchanges.begin(), limits).run(is_stopping)


class _Session:
    """Owns the machine, the exchange and the routing task of one stream."""

    __slots__ = (
        "_ending",
        "_exchange",
        "_failure",
        "_machine",
        "_read",
        "_reader",
        "_routing",
        "_stopped_reading",
        "_tasks",
        "_turn",
        "_write",
    )

    def __init__(self, read: Read, write: Write, exchange: RequestExchange, limits: Limits) -> None:
        self._read = read
        self._write = write
        self._exchange = exchange
        self._machine = StreamMachine(limits)
        self._turn = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._reader: asyncio.Task[None] | None = None  # set while reading
        self._routing: asyncio.Task[None] | None = None
        self._stopped_reading = False
        self._ending = Ending.END_OF_STREAM
        self._failure: StreamFailedError | None = None

    async def run(self, is_stopping: Callable[[], bool]) -> None:
        """Serve until the stream is over; see `serve_stream`."""
        try:
            async with self._tasks:
                # Not by `isinstance`, which costs a protocol more than the whole call.
                allow_eviction = getattr(self._exchange, "allow_eviction", None)
                if allow_eviction is not None:
                    allow_eviction(self._evict)
                await self._read_to_end()
                if self._machine.state is State.ROUTING:
                    # grpc.aio may show its own stop as the peer's end of the stream.
                    if self._ending is Ending.END_OF_STREAM and is_stopping():
                        self._ending = Ending.SHUTDOWN
                    self._cancel_routing()
        except asyncio.CancelledError as cancelled:
            self._ending = Ending.SHUTDOWN if is_stopping() else Ending.CANCELLED
            # A task group's frame holds what it raises, whose frames hold the request; see `_ask`.
            cancelled.with_traceback(None)
            raise
        finally:
            self._routing = None  # one that was cancelled holds its frames, and so this
            # Only after the group is done: nothing routes any more when the exchange finishes.
            self._end(self._machine.receive(Closed(self._ending)))
        if self._failure is not None:
            raise self._failure

    async def _read_to_end(self) -> None:
        self._reader = asyncio.current_task()
        try:
            while True:
                try:
                    message = await self._read()
                except RefusedError as refusal:
                    async with self._turn:
                        if not self._machine.is_receiving:
                            continue  # no body of a request, so it is taken all the same
                        await self._perform(self._machine.dropped(refusal))
                    return
                if message is None:
                    return
                async with self._turn:
                    await self._perform(self._machine.receive(wire.decode(message)))
                if self._machine.has_said_everything:
                    return
                del message  # a request may wait long for its turn; its body is held as it is
        except asyncio.CancelledError:
            # Either the transport cancels us, or the routing task has had the last word.
            reader = asyncio.current_task()
            if reader is None or not self._stopped_reading or reader.uncancel() > 0:
                raise
        except PickerError as error:
            self._fail(error)
        except Exception:
            log.exception("a stream failed")
            self._fail(StreamFailedError("internal error", peer_at_fault=False))
        finally:
            self._reader = None

    def _stop_reading(self) -> None:
        if self._reader is not None and not self._stopped_reading:
            self._stopped_reading = True
            self._reader.cancel()

    def _fail(self, error: PickerError) -> None:
        self._ending = Ending.ERROR
        if not isinstance(error, StreamFailedError):
            log.warning("the proxy broke the protocol: %s", error)
            error = StreamFailedError(str(error), peer_at_fault=True)
        self._failure = error

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Route):
                if self._exchange.decides_at_once:
                    await self._perform(self._answer(_at_once(self._ask(action.request))))
                else:
                    if action.is_timed:
                        await self._write(wire.encode(SendPatience(PATIENCE_SECONDS)))
                    routing = self._route(action.request)
                    self._routing = self._tasks.create_task(routing, name="route")
            elif isinstance(action, CancelRoute):
                self._cancel_routing()
            elif isinstance(action, Finish):
                self._exchange.finish(action.cause, action.response_status, action.served_by)
            else:
                await self._write(wire.encode(action))

    def _cancel_routing(self) -> None:
        if self._routing is not None:
            self._routing.cancel()

    def _end(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                self._exchange.finish(action.cause, action.response_status, action.served_by)

    async def _route(self, request: RawRequest) -> None:
        """Ask the director and answer, from a task that is not the reader."""
        await self._step(self._answer, await self._ask(request))

    async def _ask(self, request: RawRequest) -> RouteDecision | RefusedError:
        """What the director says; whatever goes wrong, the client gets an answer."""
        try:
            return await self._exchange.route(request)
        except RefusedError as refusal:
            # Its frames hold the request, and who holds it; nobody is to wait for the collector.
            return refusal.with_traceback(None)
        except Exception:
            log.exception("routing failed")
            return RefusedError(Code.INTERNAL, "the endpoint picker failed; see its log")

    def _answer(self, answer: RouteDecision | RefusedError) -> list[Action]:
        if isinstance(answer, RefusedError):
            return self._machine.dropped(answer)
        return self._machine.routed(answer)

    def _evict(self, reason: DropReason) -> None:
        evicting = self._step(self._machine.evicted, reason)
        try:
            self._tasks.create_task(evicting, name="evict")
        except RuntimeError:  # the stream is ending anyway
            evicting.close()

    async def _step(self, step: Callable[[T], list[Action]], told: T) -> None:
        """Take one step of the machine from a task that is not the reader."""
        try:
            async with self._turn:
                await self._perform(step(told))
            if self._machine.has_said_everything:
                self._stop_reading()
        except PickerError as error:
            self._fail(error)
            self._stop_reading()
        except Exception:
            log.exception("a stream failed")
            self._fail(StreamFailedError("internal error", peer_at_fault=False))
            self._stop_reading()


def _at_once(asking: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Raises `RuntimeError` for one that does."""
    try:
        asking.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    asking.close()
    raise RuntimeError("a decision waited that was said to be made at once")
