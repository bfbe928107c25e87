"""The stream machine's transition table: every pair of state and event, in both modes."""

import itertools

import pytest

from picker.errors import DropReason, RefusedError
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import Ending, Finish
from picker.extproc.machine.stream import (
    LocalProtocolError,
    RemoteProtocolError,
    State,
    StreamMachine,
)
from picker.types import RouteDecision
from tests.support.picker.stream_ways import (
    BUFFERED_HEADERS,
    DECISION,
    HEADERS,
    REFUSAL,
    WAY_TO,
    WAY_TO_BUFFERED,
    WAY_WITHOUT_REQUEST,
    feed,
)

EVENTS = {
    m.RequestHeaders: m.RequestHeaders(HEADERS),
    m.RequestBody: m.RequestBody(b"more", end_of_stream=True),
    m.RequestTrailers: m.RequestTrailers(),
    m.ResponseHeaders: m.ResponseHeaders(200),
    m.ResponseBody: m.ResponseBody(b"out", end_of_stream=True),
    m.ResponseTrailers: m.ResponseTrailers(),
    m.Closed: m.Closed(Ending.END_OF_STREAM),
    RouteDecision: DECISION,
    RefusedError: REFUSAL,
    DropReason: DropReason.EVICTED,
    m.UnknownMessage: m.UnknownMessage(),
}


AFTER_THE_END = (
    m.RequestBody,
    m.RequestTrailers,
    m.ResponseHeaders,
    m.ResponseBody,
    m.ResponseTrailers,
)
OWN = (RouteDecision, RefusedError, DropReason)
OVER = (State.DONE, State.REFUSED, State.SKIPPED, State.OBSERVING)
# (state, event) -> the kinds of the actions and the next state. What is not here is an error.
LEGAL: dict[tuple[State, type], tuple[tuple[type, ...], State]] = {
    (State.START, m.RequestHeaders): ((), State.RECEIVING),
    (State.START, m.ResponseHeaders): ((m.SendResponseHeaders,), State.RESPONDING),
    (State.START, m.Closed): ((Finish,), State.CLOSED),
    (State.RECEIVING, m.RequestBody): ((m.Route,), State.ROUTING),
    (State.RECEIVING, m.RequestTrailers): ((m.Route,), State.ROUTING),
    (State.RECEIVING, m.ResponseHeaders): ((m.SendResponseHeaders,), State.RESPONDING),
    (State.RECEIVING, RefusedError): ((Finish, m.SendImmediate), State.REFUSED),
    (State.RECEIVING, m.Closed): ((Finish,), State.CLOSED),
    (State.AWAITING_BODY, m.RequestBody): ((m.Route,), State.ROUTING),
    (State.AWAITING_BODY, m.RequestTrailers): ((Finish, m.SendImmediate), State.REFUSED),
    (State.AWAITING_BODY, m.ResponseHeaders): ((m.SendResponseHeaders,), State.RESPONDING),
    (State.AWAITING_BODY, RefusedError): ((Finish, m.SendImmediate), State.REFUSED),
    (State.AWAITING_BODY, m.Closed): ((Finish,), State.CLOSED),
    (State.ROUTING, m.RequestBody): ((), State.ROUTING),
    (State.ROUTING, m.RequestTrailers): ((), State.ROUTING),
    (State.ROUTING, m.ResponseHeaders): ((m.CancelRoute, m.SendResponseHeaders), State.RESPONDING),
    (State.ROUTING, RouteDecision): ((m.SendRequestHeaders, m.SendRequestBody), State.ROUTED),
    (State.ROUTING, RefusedError): ((Finish, m.SendImmediate), State.REFUSED),
    (State.ROUTING, m.Closed): ((Finish,), State.CLOSED),
    (State.ROUTED, m.RequestBody): ((), State.ROUTED),
    (State.ROUTED, m.RequestTrailers): ((m.SendRequestTrailers,), State.ROUTED),
    (State.ROUTED, m.ResponseHeaders): ((m.SendResponseHeaders,), State.RESPONDING),
    (State.ROUTED, m.Closed): ((Finish,), State.CLOSED),
    (State.RESPONDING, m.RequestBody): ((), State.RESPONDING),
    (State.RESPONDING, m.RequestTrailers): ((m.SendRequestTrailers,), State.RESPONDING),
    (State.RESPONDING, m.ResponseBody): ((Finish, m.SendResponseBody), State.DONE),
    (State.RESPONDING, m.ResponseTrailers): ((Finish, m.SendResponseTrailers), State.DONE),
    (State.RESPONDING, m.Closed): ((Finish,), State.CLOSED),
    (State.DONE, m.RequestBody): ((), State.DONE),
    (State.DONE, m.RequestTrailers): ((m.SendRequestTrailers,), State.DONE),
    (State.DONE, m.ResponseBody): ((), State.DONE),
    (State.DONE, m.ResponseTrailers): ((m.SendResponseTrailers,), State.DONE),
    (State.DONE, m.Closed): ((), State.CLOSED),
    **{
        (state, kind): ((), state)
        for state in (State.REFUSED, State.SKIPPED, State.OBSERVING)
        for kind in AFTER_THE_END
    },
    **{
        (state, m.UnknownMessage): ((), state)
        for state in (State.RECEIVING, State.ROUTING, State.ROUTED, State.RESPONDING, *OVER)
    },
    **{
        (state, DropReason): ((Finish, m.SendImmediate), State.REFUSED)
        for state in (
            State.START,
            State.RECEIVING,
            State.AWAITING_BODY,
            State.ROUTED,
            State.RESPONDING,
        )
    },
    (State.ROUTING, DropReason): ((m.CancelRoute, Finish, m.SendImmediate), State.REFUSED),
    **{(state, DropReason): ((), state) for state in (*OVER, State.CLOSED)},
    (State.REFUSED, m.Closed): ((), State.CLOSED),
    (State.SKIPPED, m.Closed): ((), State.CLOSED),
    (State.OBSERVING, m.Closed): ((Finish,), State.CLOSED),
    (State.CLOSED, m.Closed): ((), State.CLOSED),
}
# The pairs whose outcome is another one in buffered mode, where a request waits for each answer.
LEGAL_BUFFERED = {
    pair: outcome
    for pair, outcome in LEGAL.items()
    if pair not in {(State.ROUTING, m.UnknownMessage), (State.ROUTED, m.UnknownMessage)}
} | {
    (State.START, m.RequestHeaders): ((m.SendRequestHeadersUnchanged,), State.AWAITING_BODY),
    (State.ROUTING, RouteDecision): ((m.SendBufferedRequest,), State.ROUTED),
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
    buffered = way == "buffered"
    machine = StreamMachine()
    feed(machine, *WAYS[way][state])
    assert machine.state is state
    event = BUFFERED_HEADERS if buffered and kind is m.RequestHeaders else EVENTS[kind]
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
    assert {*WAY_TO, *WAY_TO_BUFFERED} == set(State)
