"""The state machine of one ext_proc stream: events in, actions out, no I/O.

Theory of operation
-------------------
One stream is one HTTP request. Its messages come as two phases, request then response, each made
of headers, body pieces and perhaps trailers. In full-duplex mode the proxy forwards nothing that
the picker has not sent back, so the picker may hold everything until it has seen the whole body.
In buffered mode it is the proxy that holds: it waits for an answer to the headers before it reads
the body, shows the body as one message, and keeps everything until that is answered, so that it can
go on without a picker that fails. The headers are then answered at once, with nothing in the
answer, and the decision is the answer to the body:

    START --headers, full duplex--> RECEIVING --end of body--> ROUTING --Routed--> ROUTED
    START --headers, buffered--> AWAITING_BODY --body--> ROUTING
    RECEIVING | AWAITING_BODY | ROUTING | ROUTED --response headers--> RESPONDING
    RESPONDING --end of response--> DONE
    START | RECEIVING | AWAITING_BODY | ROUTING --refused by us, Dropped--> REFUSED
    any --Closed--> CLOSED

A request whose headers carry `end_of_stream` is routed at once and answered by its headers in
either mode. Otherwise the end of the body is, in full duplex, a body message with `end_of_stream`
or trailers; in buffered mode it is the body message, whatever it says of the stream's end, since
trailers may follow it. The end yields `Route`; the shell asks the director and comes back with
`routed()` or `dropped()`. Other modes (pieces in lockstep, part of a body) are refused: there a
decision would come too late.

Replies leave in the order headers, body, trailers. Trailers that arrive while a
decision is pending are answered after the body. Response messages are answered at once and pass
through unchanged. A response may start before the decision: a proxy that gives up on a request (a
client too slow, say) shows its own error reply, and an error from us would hide it from the client.

`_TRANSITIONS` is the whole protocol: a pair (state, event) that is not in it is an error, of the
peer (`RemoteProtocolError`) or of our own shell (`LocalProtocolError`). After a refusal, and after
the end of the body, messages that the proxy had already sent are ignored, not punished: proxies
have been seen to repeat the last body message.

Whatever ends the request emits exactly one `Finish`, always before the replies of its batch, so
that a shell whose writes fail has already let go of what the request held.

Source: Endpoint Picker Protocol v1.0.0; Envoy `external_processor.proto` and
`processing_mode.proto`, FULL_DUPLEX_STREAMED and BUFFERED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeAlias, cast

from picker.errors import Code, PickerError, RefusedError, bad_request
from picker.extproc.messages import (
    Action,
    BodyMode,
    CancelRoute,
    Closed,
    Dropped,
    Ending,
    Event,
    Finish,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Routed,
    SendBufferedRequest,
    SendImmediate,
    SendRequestBody,
    SendRequestHeaders,
    SendRequestHeadersUnchanged,
    SendRequestTrailers,
    SendResponseBody,
    SendResponseBodyUnchanged,
    SendResponseHeaders,
    SendResponseTrailers,
)
from picker.types import FinishCause, RawRequest, RouteDecision

MAX_CHUNK_BYTES = 62_000  # Envoy's limit for one streamed body reply, with room for framing
DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
RESPONSE_MARK = ("x-went-into-resp-headers", "true")


class ProtocolError(PickerError):
    """An event that has no place in the present state of a stream."""


class RemoteProtocolError(ProtocolError):
    """The proxy broke the order of the protocol."""


class LocalProtocolError(ProtocolError):
    """Our own shell called the machine at the wrong time."""


class State(Enum):
    """Where a stream stands; see the theory of operation."""

    START = "start"
    RECEIVING = "receiving"
    AWAITING_BODY = "awaiting the body"
    ROUTING = "routing"
    ROUTED = "routed"
    RESPONDING = "responding"
    DONE = "done"
    REFUSED = "refused"
    CLOSED = "closed"


def body_chunks(body: bytes) -> list[bytes]:
    """Split `body` into pieces of at most `MAX_CHUNK_BYTES`; no bytes are one empty piece."""
    if len(body) <= MAX_CHUNK_BYTES:
        return [body]
    return [body[at : at + MAX_CHUNK_BYTES] for at in range(0, len(body), MAX_CHUNK_BYTES)]


class StreamMachine:
    """Sole owner of one stream's protocol state.

    `receive`, `routed` and `dropped` return the actions to perform, in order. They raise
    `ProtocolError` for an event that is illegal now; the state is then unchanged.
    """

    __slots__ = (
        "_abandoned",
        "_body",
        "_body_bytes",
        "_finished",
        "_has_body",
        "_headers",
        "_max_body_bytes",
        "_proxy_holds_body",
        "_response_body",
        "_response_status",
        "_served_by",
        "_state",
        "_subset_hint",
        "_trailers_end_body",
        "_trailers_pending",
        "_trailers_seen",
    )

    def __init__(self, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._state = State.START
        self._headers: Mapping[str, str] = {}
        self._subset_hint: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._has_body = True
        self._proxy_holds_body = False
        self._trailers_seen = False
        self._trailers_pending = False
        self._trailers_end_body = False
        self._response_body = BodyMode.DUPLEX
        self._response_status: int | None = None
        self._served_by: str | None = None
        self._abandoned = False
        self._finished = False

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def receive(self, event: Event) -> list[Action]:
        """Take what the proxy sent, or the end of the stream (`Closed`, legal at any time)."""
        return self._step(event, RemoteProtocolError)

    def routed(self, decision: RouteDecision) -> list[Action]:
        """Answer the request that `Route` handed out."""
        return self._step(Routed(decision), LocalProtocolError)

    def dropped(self, refusal: RefusedError) -> list[Action]:
        """Refuse the request that `Route` handed out."""
        return self._step(Dropped(refusal), LocalProtocolError)

    def _step(self, event: Event | Routed | Dropped, culprit: type[ProtocolError]) -> list[Action]:
        action = _TRANSITIONS.get((self._state, type(event)))
        if action is None:
            raise culprit(f"{type(event).__name__} is not allowed when {self._state.value}")
        return action(self, event)

    # Request phase

    def _begin(self, event: RequestHeaders) -> list[Action]:
        self._headers = event.headers
        self._subset_hint = event.subset_hint
        self._response_body = event.response_body
        if event.end_of_stream or event.request_body is BodyMode.ABSENT:
            self._has_body = False
            return self._route()
        if event.request_body is BodyMode.BUFFERED:
            self._proxy_holds_body = True
            self._state = State.AWAITING_BODY
            return [SendRequestHeadersUnchanged()]
        if event.request_body is BodyMode.LOCKSTEP:
            return self._refuse(_LOCKSTEP_REFUSAL)
        self._state = State.RECEIVING
        return []

    def _collect(self, event: RequestBody) -> list[Action]:
        return self._take(event, event.end_of_stream)

    def _collect_whole(self, event: RequestBody) -> list[Action]:
        return self._take(event, is_last=True)

    def _take(self, event: RequestBody, is_last: bool) -> list[Action]:
        if event.subset_hint is not None:
            self._subset_hint = event.subset_hint
        self._body_bytes += len(event.data)
        if self._body_bytes > self._max_body_bytes:
            limit = f"the request body exceeds {self._max_body_bytes} bytes"
            return self._refuse(RefusedError(Code.PAYLOAD_TOO_LARGE, limit))
        if event.data:
            self._body.append(event.data)
        return self._route() if is_last else []

    def _end_body_with_trailers(self, _: RequestTrailers) -> list[Action]:
        self._trailers_seen = self._trailers_pending = self._trailers_end_body = True
        return self._route()

    def _refuse_trailers_alone(self, _: RequestTrailers) -> list[Action]:
        """A buffering proxy shows no body that is not there, and an answer to trailers cannot
        change headers, so that a decision could not be told.
        """
        return self._refuse(_TRAILERS_ALONE_REFUSAL)

    def _route(self) -> list[Action]:
        body = b"".join(self._body) if self._has_body else None
        self._body = [body] if body else []
        self._state = State.ROUTING
        return [Route(RawRequest(self._headers, body, self._subset_hint))]

    def _defer_trailers(self, _: RequestTrailers) -> list[Action]:
        self._first_trailers()
        self._trailers_pending = True
        return []

    def _answer_trailers(self, _: RequestTrailers) -> list[Action]:
        self._first_trailers()
        return [SendRequestTrailers()]

    def _first_trailers(self) -> None:
        if self._trailers_seen:
            raise RemoteProtocolError("a request has one set of trailers, this is the second")
        self._trailers_seen = True

    def _answer(self, event: Routed) -> list[Action]:
        decision = event.decision
        original = self._body[0] if self._body else b""
        self._state, self._body = State.ROUTED, []
        if self._proxy_holds_body:
            return self._answer_held_body(decision)
        body = original if decision.body is None else decision.body
        # A length next to trailers would make an HTTP/1 upstream drop the trailers.
        length = len(body) if self._has_body and body and not self._trailers_seen else None
        headers = SendRequestHeaders(decision.destination, decision.set_headers, length)
        actions: list[Action] = [headers]
        if self._has_body and (body or not self._trailers_end_body):
            pieces = body_chunks(body)
            actions += [SendRequestBody(piece, False) for piece in pieces[:-1]]
            actions.append(SendRequestBody(pieces[-1], not self._trailers_end_body))
        if self._trailers_pending:
            actions.append(SendRequestTrailers())
        return actions

    def _answer_held_body(self, decision: RouteDecision) -> list[Action]:
        body, length = decision.body, None
        # The proxy refuses a new body that differs from the length the client stated. Where none
        # was stated, none is added: next to a length an HTTP/1 upstream drops the trailers.
        if body is not None and "content-length" in self._headers:
            length = len(body)
        reply = SendBufferedRequest(decision.destination, decision.set_headers, body, length)
        return [reply, SendRequestTrailers()] if self._trailers_pending else [reply]

    def _drop(self, event: Dropped) -> list[Action]:
        return self._refuse(event.refusal)

    def _refuse(self, refusal: RefusedError) -> list[Action]:
        self._state, self._body = State.REFUSED, []
        self._response_status = refusal.status
        reply = SendImmediate(refusal.status, refusal.body, refusal.headers)
        return [*self._finish(FinishCause.REFUSED), reply]

    # Response phase

    def _respond(self, event: ResponseHeaders) -> list[Action]:
        self._response_status = event.status
        self._served_by = event.served_by
        self._state = State.RESPONDING
        finish = self._end_response() if event.end_of_stream else []
        return [*finish, SendResponseHeaders((RESPONSE_MARK,))]

    def _respond_early(self, event: ResponseHeaders) -> list[Action]:
        """The proxy has answered the client itself; the request goes nowhere."""
        self._abandoned, self._body = True, []
        cancel: list[Action] = [CancelRoute()] if self._state is State.ROUTING else []
        return [*cancel, *self._respond(event)]

    def _pass_body(self, event: ResponseBody) -> list[Action]:
        actions: list[Action] = self._end_response() if event.end_of_stream else []
        if self._response_body in _HELD_RESPONSES:
            return [*actions, SendResponseBodyUnchanged()]
        pieces = body_chunks(event.data)
        actions += [SendResponseBody(piece, False) for piece in pieces[:-1]]
        actions.append(SendResponseBody(pieces[-1], event.end_of_stream))
        return actions

    def _pass_trailers(self, _: ResponseTrailers) -> list[Action]:
        return [*self._end_response(), SendResponseTrailers()]

    def _end_response(self) -> list[Action]:
        self._state = State.DONE
        return self._finish(self._cause_of_end())

    def _cause_of_end(self) -> FinishCause:
        return FinishCause.CLIENT_GONE if self._abandoned else FinishCause.COMPLETED

    # The end

    def _close(self, event: Closed) -> list[Action]:
        # Without response bodies the proxy shows no end of the response but the end of the stream.
        orderly = event.ending in (Ending.END_OF_STREAM, Ending.CANCELLED)
        unseen_end = self._response_body is BodyMode.ABSENT and self._state is State.RESPONDING
        self._state, self._body = State.CLOSED, []
        if orderly and unseen_end:
            return self._finish(self._cause_of_end())
        return self._finish(_CAUSE_OF_ENDING[event.ending])

    def _finish(self, cause: FinishCause) -> list[Action]:
        if self._finished:
            return []
        self._finished = True
        return [Finish(cause, self._response_status, self._served_by)]

    def _ignore(self, _: Event) -> list[Action]:
        return []


_LOCKSTEP_REFUSAL = RefusedError(
    Code.INTERNAL,
    "the gateway must send request bodies to the endpoint picker in FULL_DUPLEX_STREAMED or "
    "BUFFERED mode",
)
_TRAILERS_ALONE_REFUSAL = bad_request("a request of headers and trailers needs a body")
_HELD_RESPONSES = (BodyMode.LOCKSTEP, BodyMode.BUFFERED)

_CAUSE_OF_ENDING = {
    Ending.END_OF_STREAM: FinishCause.CLIENT_GONE,
    Ending.CANCELLED: FinishCause.CLIENT_GONE,
    Ending.ERROR: FinishCause.RESET,
    Ending.SHUTDOWN: FinishCause.SHUTDOWN,
}

_Step: TypeAlias = Callable[[StreamMachine, Event | Routed | Dropped], list[Action]]
_M = StreamMachine

_TRANSITIONS: dict[tuple[State, type], _Step] = cast(
    "dict[tuple[State, type], _Step]",
    {
        (State.START, RequestHeaders): _M._begin,
        (State.RECEIVING, RequestBody): _M._collect,
        (State.RECEIVING, RequestTrailers): _M._end_body_with_trailers,
        (State.RECEIVING, ResponseHeaders): _M._respond_early,
        (State.AWAITING_BODY, RequestBody): _M._collect_whole,
        (State.AWAITING_BODY, RequestTrailers): _M._refuse_trailers_alone,
        (State.AWAITING_BODY, ResponseHeaders): _M._respond_early,
        (State.ROUTING, RequestBody): _M._ignore,
        (State.ROUTING, RequestTrailers): _M._defer_trailers,
        (State.ROUTING, Routed): _M._answer,
        (State.ROUTING, Dropped): _M._drop,
        (State.ROUTING, ResponseHeaders): _M._respond_early,
        (State.ROUTED, RequestBody): _M._ignore,
        (State.ROUTED, RequestTrailers): _M._answer_trailers,
        (State.ROUTED, ResponseHeaders): _M._respond,
        (State.RESPONDING, RequestBody): _M._ignore,
        (State.RESPONDING, RequestTrailers): _M._answer_trailers,
        (State.RESPONDING, ResponseBody): _M._pass_body,
        (State.RESPONDING, ResponseTrailers): _M._pass_trailers,
        (State.DONE, RequestBody): _M._ignore,
        (State.DONE, RequestTrailers): _M._answer_trailers,
        (State.DONE, ResponseBody): _M._ignore,
        (State.REFUSED, RequestBody): _M._ignore,
        (State.REFUSED, RequestTrailers): _M._ignore,
        (State.REFUSED, ResponseHeaders): _M._ignore,
        (State.REFUSED, ResponseBody): _M._ignore,
        (State.REFUSED, ResponseTrailers): _M._ignore,
        **{(state, Closed): _M._close for state in State},
    },
)
