"""The stream machine's transition table: every pair of state and event, in both modes."""

from __future__ import annotations

import itertools

import pytest
from stream_ways import (
    BUFFERED_HEADERS,
    DECISION,
    HEADERS,
    REFUSAL,
    WAY_TO,
    WAY_TO_BUFFERED,
    WAY_WITHOUT_REQUEST,
    feed,
)

from picker.errors import DropReason
from picker.extproc.machine.messages import (
    CancelRoute,
    Closed,
    Dropped,
    Ending,
    Evicted,
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
    SendResponseHeaders,
    SendResponseTrailers,
    UnknownMessage,
)
from picker.extproc.machine.stream import (
    LocalProtocolError,
    RemoteProtocolError,
    State,
    StreamMachine,
)

EVENTS = {
    RequestHeaders: RequestHeaders(HEADERS),
    RequestBody: RequestBody(b"more", end_of_stream=True),
    RequestTrailers: RequestTrailers(),
    ResponseHeaders: ResponseHeaders(200),
    ResponseBody: ResponseBody(b"out", end_of_stream=True),
    ResponseTrailers: ResponseTrailers(),
    Closed: Closed(Ending.END_OF_STREAM),
    Routed: Routed(DECISION),
    Dropped: Dropped(REFUSAL),
    Evicted: Evicted(DropReason.EVICTED),
    UnknownMessage: UnknownMessage(),
}


AFTER_THE_END = (RequestBody, RequestTrailers, ResponseHeaders, ResponseBody, ResponseTrailers)
OWN = (Routed, Dropped, Evicted)
OVER = (State.DONE, State.REFUSED, State.SKIPPED, State.OBSERVING)
# (state, event) -> the kinds of the actions and the next state. What is not here is an error.
LEGAL: dict[tuple[State, type], tuple[tuple[type, ...], State]] = {
    (State.START, RequestHeaders): ((), State.RECEIVING),
    (State.START, ResponseHeaders): ((SendResponseHeaders,), State.RESPONDING),
    (State.START, Closed): ((Finish,), State.CLOSED),
    (State.RECEIVING, RequestBody): ((Route,), State.ROUTING),
    (State.RECEIVING, RequestTrailers): ((Route,), State.ROUTING),
    (State.RECEIVING, ResponseHeaders): ((SendResponseHeaders,), State.RESPONDING),
    (State.RECEIVING, Dropped): ((Finish, SendImmediate), State.REFUSED),
    (State.RECEIVING, Closed): ((Finish,), State.CLOSED),
    (State.AWAITING_BODY, RequestBody): ((Route,), State.ROUTING),
    (State.AWAITING_BODY, RequestTrailers): ((Finish, SendImmediate), State.REFUSED),
    (State.AWAITING_BODY, ResponseHeaders): ((SendResponseHeaders,), State.RESPONDING),
    (State.AWAITING_BODY, Dropped): ((Finish, SendImmediate), State.REFUSED),
    (State.AWAITING_BODY, Closed): ((Finish,), State.CLOSED),
    (State.ROUTING, RequestBody): ((), State.ROUTING),
    (State.ROUTING, RequestTrailers): ((), State.ROUTING),
    (State.ROUTING, ResponseHeaders): ((CancelRoute, SendResponseHeaders), State.RESPONDING),
    (State.ROUTING, Routed): ((SendRequestHeaders, SendRequestBody), State.ROUTED),
    (State.ROUTING, Dropped): ((Finish, SendImmediate), State.REFUSED),
    (State.ROUTING, Closed): ((Finish,), State.CLOSED),
    (State.ROUTED, RequestBody): ((), State.ROUTED),
    (State.ROUTED, RequestTrailers): ((SendRequestTrailers,), State.ROUTED),
    (State.ROUTED, ResponseHeaders): ((SendResponseHeaders,), State.RESPONDING),
    (State.ROUTED, Closed): ((Finish,), State.CLOSED),
    (State.RESPONDING, RequestBody): ((), State.RESPONDING),
    (State.RESPONDING, RequestTrailers): ((SendRequestTrailers,), State.RESPONDING),
    (State.RESPONDING, ResponseBody): ((Finish, SendResponseBody), State.DONE),
    (State.RESPONDING, ResponseTrailers): ((Finish, SendResponseTrailers), State.DONE),
    (State.RESPONDING, Closed): ((Finish,), State.CLOSED),
    (State.DONE, RequestBody): ((), State.DONE),
    (State.DONE, RequestTrailers): ((SendRequestTrailers,), State.DONE),
    (State.DONE, ResponseBody): ((), State.DONE),
    (State.DONE, ResponseTrailers): ((SendResponseTrailers,), State.DONE),
    (State.DONE, Closed): ((), State.CLOSED),
    **{
        (state, kind): ((), state)
        for state in (State.REFUSED, State.SKIPPED, State.OBSERVING)
        for kind in AFTER_THE_END
    },
    **{
        (state, UnknownMessage): ((), state)
        for state in (State.RECEIVING, State.ROUTING, State.ROUTED, State.RESPONDING, *OVER)
    },
    **{
        (state, Evicted): ((Finish, SendImmediate), State.REFUSED)
        for state in (
            State.START,
            State.RECEIVING,
            State.AWAITING_BODY,
            State.ROUTED,
            State.RESPONDING,
        )
    },
    (State.ROUTING, Evicted): ((CancelRoute, Finish, SendImmediate), State.REFUSED),
    **{(state, Evicted): ((), state) for state in (*OVER, State.CLOSED)},
    (State.REFUSED, Closed): ((), State.CLOSED),
    (State.SKIPPED, Closed): ((), State.CLOSED),
    (State.OBSERVING, Closed): ((Finish,), State.CLOSED),
    (State.CLOSED, Closed): ((), State.CLOSED),
}
# The pairs whose outcome is another one in buffered mode, where a request waits for each answer.
LEGAL_BUFFERED = {
    pair: outcome
    for pair, outcome in LEGAL.items()
    if pair not in {(State.ROUTING, UnknownMessage), (State.ROUTED, UnknownMessage)}
} | {
    (State.START, RequestHeaders): ((SendRequestHeadersUnchanged,), State.AWAITING_BODY),
    (State.ROUTING, Routed): ((SendBufferedRequest,), State.ROUTED),
}
WAYS = {"duplex": WAY_TO, "buffered": WAY_TO_BUFFERED, "no-request": WAY_WITHOUT_REQUEST}
EVERY_CASE = [
    (way, state, kind)
    for way, way_to in WAYS.items()
    for state, kind in itertools.product(way_to, EVENTS)
]


@pytest.mark.parametrize(
    ("way", "state", "kind"),
    EVERY_CASE,
    ids=[f"{way}-{state.value}-{kind.__name__}" for way, state, kind in EVERY_CASE],
)
def test_every_pair_of_state_and_event_does_what_the_table_says(
    way: str, state: State, kind: type
) -> None:
    """Each pair either gives the actions and the state of the table, or is its culprit's error."""
    buffered = way == "buffered"
    machine = StreamMachine()
    feed(machine, *WAYS[way][state])
    assert machine.state is state
    event = BUFFERED_HEADERS if buffered and kind is RequestHeaders else EVENTS[kind]
    expected = (LEGAL_BUFFERED if buffered else LEGAL).get((state, kind))
    if expected is None:
        culprit = LocalProtocolError if kind in OWN else RemoteProtocolError
        with pytest.raises(culprit, match=r"not allowed|unknown kind"):
            feed(machine, event)
        assert machine.state is state
        return
    actions = feed(machine, event)
    assert (tuple(map(type, actions)), machine.state) == expected


def test_every_state_is_reached_in_one_mode_or_the_other() -> None:
    """The cases above leave no state out."""
    assert {*WAY_TO, *WAY_TO_BUFFERED} == set(State)
