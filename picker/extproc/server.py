"""The ext_proc server. It passes the messages of each stream through the machine and the director.

Most decisions need no wait and are made inline. One that has to wait runs in its own task, so that
a client that disconnects cancels its request. No other code here awaits, so the steps of a stream
never interleave.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

from picker.errors import Code, DropReason, PickerError, RefusedError
from picker.extproc import wire
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import Action, Ending, Finish
from picker.extproc.machine.request_phase import StreamSettings, no_room
from picker.extproc.machine.stream import SAID_EVERYTHING, State, StreamMachine
from picker.extproc.reports import ResponseReports
from picker.extproc.wire import METHOD
from picker.metrics.picker_metrics import PickerMetrics
from picker.rpc.call import Call, Served
from picker.rpc.calls import Abort, Metadata, Receiver, Status
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer
from picker.types import BodyReport, FinishCause, RawRequest, RouteDecision

log = logging.getLogger(__name__)

T = TypeVar("T")
Evict: TypeAlias = Callable[[DropReason], None]
# For a decision that waits. A proxy with a lower bound of its own ignores it.
OVERRIDE_TIMEOUT_SECONDS = 300
# For a report behind the end of its stream, which comes in the same read or the next one.
REPORT_SECONDS = 0.1
_WAIT_LONGER = wire.encode(m.OverrideTimeout(OVERRIDE_TIMEOUT_SECONDS))
_ENDINGS = {
    Abort.CANCELLED: (Ending.CANCELLED, Status.CANCELLED),
    Abort.BROKEN: (Ending.ERROR, Status.INVALID_ARGUMENT),
    Abort.SHUTDOWN: (Ending.SHUTDOWN, Status.CANCELLED),
}


class RequestExchange(Protocol):
    def decides_at_once(self, raw: RawRequest) -> bool:
        """Return whether `route(raw)`, called right now, would not wait. Called at most once."""

    def route(self, raw: RawRequest) -> Coroutine[Any, Any, RouteDecision]:
        """Decide where `raw` goes. Raises `RefusedError`; may be cancelled."""

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        """End the request. Called exactly once, whatever ends the stream."""


class ExchangeSource(Protocol):
    """Opens an exchange for each stream; the director."""

    def begin(self, evict: Evict, /) -> RequestExchange:
        """Open a stream's exchange; `evict` stops its request and may be called at any time."""


class StreamMetrics:
    """Counts streams by their status; optional, because of its cost for each stream."""

    def __init__(self, metrics: PickerMetrics, clock: Callable[[], float]) -> None:
        self._series, self._clock = metrics.streams, clock
        self.reports = metrics.streams.reports_total

    def begin(self) -> float:
        self._series.inflight.inc()
        return self._clock()

    def end(self, begun: float, status: Status) -> None:
        self._series.inflight.dec()
        self._series.duration_seconds.observe(self._clock() - begun)
        self._series.total.labels(code_name(status)).inc()


class StreamPump:
    """Implements `Receiver`. Owns the machine, the exchange and the routing task of one stream."""

    __slots__ = (
        "_awaiting",
        "_begun",
        "_call",
        "_closing",
        "_exchange",
        "_machine",
        "_report_id",
        "_reports",
        "_routing",
        "_streams",
    )

    def __init__(
        self,
        call: Call,
        exchanges: ExchangeSource,
        settings: StreamSettings,
        streams: StreamMetrics | None = None,
        reports: ResponseReports | None = None,
    ) -> None:
        self._call = call
        self._reports = reports
        self._report_id = "" if reports is None else reports.open(self._report)
        self._machine = StreamMachine(settings, self._report_id)
        self._routing: asyncio.Task[RouteDecision | RefusedError] | None = None
        self._awaiting: asyncio.TimerHandle | None = None  # it ends the stream without a report
        # How the stream ended, and what the call ends with (None: it has ended already).
        self._closing: tuple[Ending, Status, str | None] | None = None
        self._streams = streams
        self._begun = 0.0 if streams is None else streams.begin()
        self._exchange = exchanges.begin(self._evict)

    # Called for the proxy; see `Receiver`

    def message(self, data: bytes) -> None:
        if self._closing is None:
            try:
                self._perform(self._machine.receive(wire.decode(data)))
            except PickerError as error:
                self._blame(error)
            except Exception:
                log.exception("a stream failed")
                self._close(Ending.ERROR, Status.INTERNAL, "internal error")

    def end_of_messages(self) -> None:
        self._end(Ending.END_OF_STREAM, Status.OK, "")

    def refuses_large_message(self) -> bool:
        """Refuse a body for which there is no room; return False for a response: it continues."""
        if self._machine.state not in (State.RECEIVING, State.AWAITING_BODY):
            return False
        self._step(self._machine.dropped, no_room())
        return True

    def abort(self, why: Abort) -> None:
        ending, status = _ENDINGS[why]
        if why is Abort.BROKEN:
            log.warning("the proxy broke the protocol: a message that is none of gRPC")
        self._end(ending, status, None)

    # Called for Envoy's reports

    def _report(self, report: BodyReport) -> None:
        if self._closing is None:
            try:
                self._machine.reported(report)
            except Exception:
                log.exception("a report on a response failed")
            if self._awaiting is not None and report.is_last:
                self._close(Ending.END_OF_STREAM, Status.OK, "")

    def _end(self, ending: Ending, status: Status, text: str | None) -> None:
        """End the stream, if need be after the report on the response, which is on its way."""
        is_orderly = ending in (Ending.END_OF_STREAM, Ending.CANCELLED)
        if self._closing is not None or not is_orderly or not self._machine.awaits_report:
            self._close(ending, status, text)
        elif self._awaiting is None:
            later = asyncio.get_running_loop().call_later
            self._awaiting = later(REPORT_SECONDS, self._close, ending, status, text)

    # Steps

    def _step(self, step: Callable[[T], list[Action]], event: T) -> None:
        if self._closing is None:
            try:
                self._perform(step(event))
            except PickerError as error:
                self._blame(error)
            except Exception:
                log.exception("a stream failed")
                self._close(Ending.ERROR, Status.INTERNAL, "internal error")

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, m.Route):
                self._route(action)
            elif isinstance(action, Finish):
                self._exchange.finish(action.cause, action.response_status, action.served_by)
            elif isinstance(action, m.CancelRoute):
                if self._routing is not None:
                    self._routing.cancel()
            else:
                self._call.send(wire.encode(action))
        if self._machine.state in SAID_EVERYTHING:
            self._close(Ending.END_OF_STREAM, Status.OK, "")

    def _route(self, action: m.Route) -> None:
        if not self._exchange.decides_at_once(action.request):
            if action.is_timed:
                self._call.send(_WAIT_LONGER)
            self._routing = self._call.spawn(self._ask(action.request))
            self._routing.add_done_callback(self._routed)
            return
        routing, refusal = self._exchange.route(action.request), None
        try:
            routing.send(None)  # runs to its end, because it never waits
        except StopIteration as done:
            decision: RouteDecision = done.value
        except RefusedError as error:
            refusal = error.with_traceback(None)  # see `_ask`
        except Exception:
            log.exception("routing failed")
            refusal = _our_failure()
        else:
            routing.close()
            raise RuntimeError("a decision waited that was said to be made at once")
        machine = self._machine
        self._perform(machine.routed(decision) if refusal is None else machine.dropped(refusal))

    def _routed(self, task: asyncio.Task[RouteDecision | RefusedError]) -> None:
        self._routing = None  # a cancelled task refers to its frames, and so to this
        if self._closing is not None:
            self._closed(*self._closing)
        elif not task.cancelled():
            answer = task.result()
            if isinstance(answer, RefusedError):
                self._step(self._machine.dropped, answer)
            else:
                self._step(self._machine.routed, answer)

    async def _ask(self, request: RawRequest) -> RouteDecision | RefusedError:
        try:
            return await self._exchange.route(request)
        except RefusedError as error:
            # Its frames refer to the request, and would wait for the garbage collector.
            return error.with_traceback(None)
        except Exception:
            log.exception("routing failed")
            return _our_failure()

    def _evict(self, reason: DropReason) -> None:
        # Deferred: the caller may be in the middle of admitting another request.
        asyncio.get_running_loop().call_soon(self._step, self._machine.evicted, reason)

    # The end

    def _blame(self, error: PickerError) -> None:
        log.warning("the proxy broke the protocol: %s", error)
        self._close(Ending.ERROR, Status.INVALID_ARGUMENT, str(error))

    def _close(self, ending: Ending, status: Status, text: str | None) -> None:
        """End the stream, after cancelling a pending decision; the first ending counts."""
        if self._closing is None:
            self._closing = (ending, status, text)
            if self._awaiting is not None:
                self._awaiting.cancel()
                self._awaiting = None  # which refers to this
            if self._routing is None:
                self._closed(ending, status, text)
            else:
                self._routing.cancel()

    def _closed(self, ending: Ending, status: Status, text: str | None) -> None:
        for action in self._machine.receive(m.Closed(ending)):
            if isinstance(action, Finish):
                self._exchange.finish(action.cause, action.response_status, action.served_by)
        if self._reports is not None:
            self._reports.close(self._report_id)
        if text is not None:
            self._call.end(status, text)
        if self._streams is not None:
            self._streams.end(self._begun, status)


def _our_failure() -> RefusedError:
    return RefusedError(Code.INTERNAL, "the endpoint picker failed; see its log")


def code_name(status: Status) -> str:
    """Return a status as Go's gRPC spells it, because dashboards select by that name."""
    if status is Status.OK:
        return "OK"
    # Go writes this word with one "l".
    name = "CANCELED" if status is Status.CANCELLED else status.name
    return "".join(word.capitalize() for word in name.split("_"))


# A director, or a quick function that chooses the one of several pools by the metadata of a call.
Exchanges: TypeAlias = ExchangeSource | Callable[[Metadata], ExchangeSource]


def build_server(
    exchanges: Exchanges,
    *,
    options: ServerOptions,
    health: HealthService | None = None,
    settings: StreamSettings | None = None,
    streams: StreamMetrics | None = None,
    reports: ResponseReports | None = None,
) -> GrpcServer:
    """Create the server; `exchanges` is the director, or chooses that of one of several pools.

    With `health`, the same port serves health checks, with `reports` those of Envoy on responses.
    `streams` counts streams. A buffered body is one message. A message beyond the port's limit
    breaks the stream, but a body beyond its limit is refused with 413, so the latter must be
    smaller. Both count in the budget of `options`.
    """
    settings = replace(settings or StreamSettings(), budget=options.budget)
    table = {METHOD: processing(exchanges, settings, streams, reports)}
    for more in (health, reports):
        if more is not None:
            table.update(more.methods())
    return GrpcServer(options, table)


def processing(
    exchanges: Exchanges,
    settings: StreamSettings,
    streams: StreamMetrics | None = None,
    reports: ResponseReports | None = None,
) -> Served:
    def serve(call: Call, metadata: Metadata) -> Receiver:
        source = exchanges(metadata) if callable(exchanges) else exchanges
        return StreamPump(call, source, settings, streams, reports)

    return serve
