"""The state machine of one ext_proc stream: events in, actions out, no I/O.

One stream is one HTTP request. In full duplex the proxy forwards nothing that the picker has not
sent back. In buffered mode it holds the request itself: it shows the body as one message, and the
decision is the answer to that. `_TRANSITIONS` is the whole protocol: a pair (state, event) that is
not in it is an error, of the peer (`RemoteProtocolError`) or of our own shell
(`LocalProtocolError`).

A request is routed as soon as it is complete; one that opens a tunnel (CONNECT, an upgrade) is
complete with its headers, because its client sends nothing until it has the response. Replies leave
in the order headers, body, trailers. Messages of the response are answered at once.

A response may start before the decision: a proxy that gives up on a request (a client too slow,
say) shows its own error reply, and an error from us would hide it from the client. A response that
does not concern the picker does not keep the stream open. In full duplex Envoy would then lose
pieces of it (measured), so it passes unwatched instead. After a refusal, and after the end of the
body, messages are ignored: proxies have been seen to repeat the last body message.

Whatever ends the request emits exactly one `Finish`, always before the replies of its batch, so
that a shell whose writes fail has already released the resources of the request.

Source: Endpoint Picker Protocol v1.0.0, and Envoy's `external_processor.proto`.
"""

import logging
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias, cast

from picker.errors import (
    EVICTED_STATUS,
    DropReason,
    EvictedError,
    PickerError,
    RefusedError,
    bad_request,
)
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import Action, BodyMode, Ending, Event, Finish, OwnEvent
from picker.extproc.machine.request_phase import RequestPhase, StreamSettings
from picker.extproc.machine.response_phase import ResponsePhase
from picker.types import BodyReport, FinishCause, RouteDecision

log = logging.getLogger(__name__)


class ProtocolError(PickerError):
    """An event that is illegal in the current state of a stream."""


class RemoteProtocolError(ProtocolError):
    """The proxy broke the order of the protocol."""


class LocalProtocolError(ProtocolError):
    """The shell called the machine at the wrong time."""


class State(Enum):
    START = "start"
    OBSERVING = "observing"
    RECEIVING = "receiving"
    AWAITING_BODY = "awaiting the body"
    ROUTING = "routing"
    ROUTED = "routed"
    RESPONDING = "responding"
    DONE = "done"
    SKIPPED = "skipped"
    REFUSED = "refused"
    CLOSED = "closed"

    __hash__ = object.__hash__  # for the table below: that of `Enum` is slower than the look-up


# The first character of an id says which reports the proxy sends under it.
FIRST_AND_END, END_ALONE = "f", "e"
# The shell ends the stream after it has written the replies.
SAID_EVERYTHING = (State.REFUSED, State.SKIPPED)


class StreamMachine:
    """Sole owner of one stream's protocol state.

    `receive`, `routed`, `dropped` and `evicted` return the actions to perform, in order. They raise
    `ProtocolError` for an event that is illegal now; the state is then unchanged.
    """

    __slots__ = (
        "_abandoned",
        "_finished",
        "_has_request",
        "_is_cut",
        "_report_id",
        "_request",
        "_response",
        "_response_status",
        "_served_by",
        "_skips_response",
        "state",
    )

    def __init__(self, settings: StreamSettings | None = None, report_id: str = "") -> None:
        """With `report_id` the proxy is asked to report under it on a response it does not show."""
        settings = settings or StreamSettings()
        self._report_id = report_id
        self._is_cut = False  # the proxy reports that the client left within the response
        self.state = State.START  # only the machine sets it
        self._request = RequestPhase(settings)
        self._response = ResponsePhase(is_marked=settings.conformance)
        self._response_status: int | None = None
        self._served_by: str | None = None
        self._abandoned = False
        self._has_request = True
        self._skips_response = False
        self._finished = False

    def receive(self, event: Event) -> list[Action]:
        """Process a message, or the end of the stream (`Closed`, legal at any time)."""
        action = _TRANSITIONS.get((self.state, type(event)))
        if action is None:
            raise RemoteProtocolError(_not_allowed(self.state, event))
        return action(self, event)

    def routed(self, decision: RouteDecision) -> list[Action]:
        return self._take_own(RouteDecision, decision)

    def dropped(self, refusal: RefusedError) -> list[Action]:
        """Refuse a request that is being routed, or one whose body is arriving."""
        return self._take_own(RefusedError, refusal)

    def evicted(self, reason: DropReason) -> list[Action]:
        """Stop the request in favour of others; has no effect on one that is over."""
        return self._take_own(DropReason, reason)

    @property
    def awaits_report(self) -> bool:
        """True if the response has begun and its proxy has yet to report its end."""
        return self.state is State.RESPONDING and self._response.awaits_report

    def reported(self, report: BodyReport) -> None:
        """Take a report on the response; one that comes before or after it has no effect."""
        if self.state is State.RESPONDING:
            self._is_cut = report.is_cut
            self._response.report(report)

    def _take_own(self, kind: type, event: OwnEvent) -> list[Action]:
        action = _TRANSITIONS.get((self.state, kind))
        if action is None:
            raise LocalProtocolError(_not_allowed(self.state, event))
        return action(self, event)

    # Request phase

    def _begin(self, event: m.RequestHeaders) -> list[Action]:
        if event.only_observes:
            log.warning("a proxy only observes: it follows no decision, so none is made")
            self.state = State.OBSERVING
            return []
        try:
            self._request.begin(event)
            self._response.expect(event.response_body)
        except RefusedError as refusal:
            return self._refuse(refusal)
        if not self._request.has_body:
            return self._route()
        if event.request_body is BodyMode.BUFFERED:
            self.state = State.AWAITING_BODY
            return [m.SendRequestHeadersUnchanged()]
        self.state = State.RECEIVING
        return []

    def _collect(self, event: m.RequestBody) -> list[Action]:
        # A buffered body is one message, which does not say `end_of_stream` if trailers follow.
        is_last = event.end_of_stream or self.state is State.AWAITING_BODY
        try:
            self._request.add(event, is_last)
        except RefusedError as refusal:
            return self._refuse(refusal)
        return self._route() if is_last else []

    def _end_body_with_trailers(self, _: m.RequestTrailers) -> list[Action]:
        self._request.trailers_end_body = True
        self._request.trailers_seen = self._request.trailers_pending = True
        return self._route()

    def _refuse_trailers_alone(self, _: m.RequestTrailers) -> list[Action]:
        # A buffering proxy shows no empty body, and a reply to trailers carries no decision.
        return self._refuse(bad_request("a request of headers and trailers needs a body"))

    def _route(self) -> list[Action]:
        self.state = State.ROUTING
        # Envoy applies no message timeout while a body is streamed both ways (measured).
        is_timed = self._request.mode is not BodyMode.DUPLEX
        return [m.Route(self._request.complete(), is_timed)]

    def _defer_body(self, event: m.RequestBody) -> list[Action]:
        try:
            self._request.add_behind(event)
        except RefusedError as refusal:
            return [m.CancelRoute(), *self._refuse(refusal)]
        return []

    def _pass_request_body(self, event: m.RequestBody) -> list[Action]:
        return [] if self._abandoned else self._request.pass_on(event)

    def _take_trailers(self, _: m.RequestTrailers) -> list[Action]:
        if self._request.trailers_seen:
            raise RemoteProtocolError("a request has one set of trailers, this is the second")
        self._request.trailers_seen = True
        if self.state is State.ROUTING:
            # Replies leave in the order headers, body, trailers.
            self._request.trailers_pending = True
            return []
        return [m.SendRequestTrailers()]

    def _answer(self, decision: RouteDecision) -> list[Action]:
        replies = self._request.answer(decision, self._asked_report(decision))
        self._skips_response = decision.skip_response
        if self._skips_response and self._response.may_be_left:
            self.state = State.SKIPPED
            return [*self._finish(FinishCause.SKIPPED), *replies]
        self.state = State.ROUTED
        if not self._skips_response:
            self._response.watch(decision, self._request)
        return replies

    def _asked_report(self, decision: RouteDecision) -> str:
        is_wanted = self._report_id and self._request.has_body and self._response.is_hidden
        if not is_wanted or decision.response is None or decision.skip_response:
            return ""
        self._response.is_reported = True
        self._response.first_is_reported = decision.watches_first_piece
        # The proxy reports on the first piece only if asked to, because each report costs.
        return (FIRST_AND_END if decision.watches_first_piece else END_ALONE) + self._report_id

    def _refuse(self, refusal: RefusedError) -> list[Action]:
        self._response_status = refusal.status
        return self._end_with(FinishCause.REFUSED, self._request.refusal(refusal))

    def _evict(self, reason: DropReason) -> list[Action]:
        cancel: list[Action] = [m.CancelRoute()] if self.state is State.ROUTING else []
        if self._response_status is None:
            self._response_status = EVICTED_STATUS
        reply = self._request.refusal(EvictedError(reason))
        return [*cancel, *self._end_with(FinishCause.EVICTED, reply)]

    def _end_with(self, cause: FinishCause, reply: m.SendImmediate) -> list[Action]:
        self.state = State.REFUSED
        self._request.drop_body()
        # A shell whose write fails must have released the request before.
        return [*self._finish(cause), reply]

    # Response phase

    def _respond(self, event: m.ResponseHeaders) -> list[Action]:
        self._response_status = event.status
        self._served_by = event.served_by
        self.state = State.RESPONDING
        finish = self._end_response() if event.end_of_stream else []
        return [*finish, self._response.begin(event)]

    def _respond_alone(self, event: m.ResponseHeaders) -> list[Action]:
        """Pass the response of an earlier filter, which answered without showing the request."""
        self._has_request = False
        if event.only_observes:
            self.state = State.OBSERVING
            return []
        self._response_status = event.status
        self.state = State.RESPONDING
        finish = self._end_response() if event.end_of_stream else []
        return [*finish, self._response.pass_on(event)]

    def _respond_early(self, event: m.ResponseHeaders) -> list[Action]:
        """Pass the proxy's own response to the client; the request reaches no endpoint."""
        self._abandoned = True
        self._request.drop_body()
        cancel: list[Action] = [m.CancelRoute()] if self.state is State.ROUTING else []
        return [*cancel, *self._respond(event)]

    def _pass_body(self, event: m.ResponseBody) -> list[Action]:
        finish = self._end_response() if event.end_of_stream else []
        return [*finish, *self._response.piece(event)]

    def _pass_trailers(self, _: m.ResponseTrailers) -> list[Action]:
        return [*self._end_response(), *self._response.trailers()]

    def _end_response(self) -> list[Action]:
        self.state = State.DONE
        return self._finish(self._cause_of_end())

    def _cause_of_end(self) -> FinishCause:
        if self._abandoned or self._is_cut:
            return FinishCause.CLIENT_GONE
        is_skipped = self._skips_response or not self._has_request
        return FinishCause.SKIPPED if is_skipped else FinishCause.COMPLETED

    # Messages outside of the phases

    def _pass_over(self, event: m.UnknownMessage) -> list[Action]:
        phase = self._response if self.state is State.RESPONDING else self._request
        if phase.waits_for_replies:
            raise RemoteProtocolError("a message of an unknown kind, to which an answer is due")
        return self._ignore_unknown(event)

    def _ignore_unknown(self, _: m.UnknownMessage) -> list[Action]:
        log.warning("ignoring a message of an unknown kind when %s", self.state.value)
        return []

    def _ignore(self, _: Event) -> list[Action]:
        return []

    # The end

    def _close(self, event: m.Closed) -> list[Action]:
        orderly = event.ending in (Ending.END_OF_STREAM, Ending.CANCELLED)
        before, self.state = self.state, State.CLOSED
        self._request.drop_body()
        if orderly and (before is State.OBSERVING or not self._has_request):
            return self._finish(FinishCause.SKIPPED)
        # Without response bodies the end of the stream is the only sign of the end of the response.
        if orderly and before is State.RESPONDING and self._response.end_is_unseen:
            return self._finish(self._cause_of_end())
        return self._finish(_CAUSE_OF_ENDING[event.ending])

    def _finish(self, cause: FinishCause) -> list[Action]:
        if self._finished:
            return []
        self._finished = True
        return [Finish(cause, self._response_status, self._served_by)]


def _not_allowed(state: State, event: Event | OwnEvent) -> str:
    return f"{type(event).__name__} is not allowed when {state.value}"


_CAUSE_OF_ENDING = {
    Ending.END_OF_STREAM: FinishCause.CLIENT_GONE,
    Ending.CANCELLED: FinishCause.CLIENT_GONE,
    Ending.ERROR: FinishCause.RESET,
    Ending.SHUTDOWN: FinishCause.SHUTDOWN,
}

_Step: TypeAlias = Callable[[StreamMachine, Event | OwnEvent], list[Action]]
_M = StreamMachine
_DEAF = (State.OBSERVING, State.SKIPPED, State.REFUSED)
_OVER = (*_DEAF, State.DONE, State.CLOSED)
_ANY_MESSAGE = (
    m.RequestBody,
    m.RequestTrailers,
    m.ResponseHeaders,
    m.ResponseBody,
    m.ResponseTrailers,
)

_TRANSITIONS: dict[tuple[State, type], _Step] = cast(
    "dict[tuple[State, type], _Step]",
    {
        (State.START, m.RequestHeaders): _M._begin,
        (State.START, m.ResponseHeaders): _M._respond_alone,
        (State.RECEIVING, m.RequestBody): _M._collect,
        (State.RECEIVING, m.RequestTrailers): _M._end_body_with_trailers,
        (State.RECEIVING, m.ResponseHeaders): _M._respond_early,
        (State.RECEIVING, RefusedError): _M._refuse,
        (State.RECEIVING, m.UnknownMessage): _M._pass_over,
        (State.AWAITING_BODY, m.RequestBody): _M._collect,
        (State.AWAITING_BODY, m.RequestTrailers): _M._refuse_trailers_alone,
        (State.AWAITING_BODY, m.ResponseHeaders): _M._respond_early,
        (State.AWAITING_BODY, RefusedError): _M._refuse,
        (State.ROUTING, m.RequestBody): _M._defer_body,
        (State.ROUTING, m.RequestTrailers): _M._take_trailers,
        (State.ROUTING, RouteDecision): _M._answer,
        (State.ROUTING, RefusedError): _M._refuse,
        (State.ROUTING, m.ResponseHeaders): _M._respond_early,
        (State.ROUTING, m.UnknownMessage): _M._pass_over,
        (State.ROUTED, m.RequestBody): _M._pass_request_body,
        (State.ROUTED, m.RequestTrailers): _M._take_trailers,
        (State.ROUTED, m.ResponseHeaders): _M._respond,
        (State.ROUTED, m.UnknownMessage): _M._pass_over,
        (State.RESPONDING, m.RequestBody): _M._pass_request_body,
        (State.RESPONDING, m.RequestTrailers): _M._take_trailers,
        (State.RESPONDING, m.ResponseBody): _M._pass_body,
        (State.RESPONDING, m.ResponseTrailers): _M._pass_trailers,
        (State.RESPONDING, m.UnknownMessage): _M._pass_over,
        (State.DONE, m.RequestBody): _M._pass_request_body,
        (State.DONE, m.RequestTrailers): _M._take_trailers,
        (State.DONE, m.ResponseBody): _M._ignore,
        # Some proxies show the end of the body as the end of the stream, and trailers after it.
        (State.DONE, m.ResponseTrailers): _M._pass_trailers,
        (State.DONE, m.UnknownMessage): _M._ignore_unknown,
        # The proxy may have sent these before it learned of the end.
        **{(state, kind): _M._ignore for state in _DEAF for kind in _ANY_MESSAGE},
        **{(state, m.UnknownMessage): _M._ignore_unknown for state in _DEAF},
        **{(state, DropReason): _M._ignore if state in _OVER else _M._evict for state in State},
        **{(state, m.Closed): _M._close for state in State},
    },
)
