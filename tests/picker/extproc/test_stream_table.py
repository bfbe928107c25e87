"""The stream machine's transition table: every pair of state and event, and random walks."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.errors import Code, DropReason, RefusedError
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Ending, Finish
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.machine.stream import (
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
    State,
    StreamMachine,
)
from picker.rpc.budget import ByteBudget
from picker.types import RouteDecision
from tests.depth import examples
from tests.support.picker.random_taps import HoldingTap, taps
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


MAX_BODY_BYTES = 200_000
REFUSAL = RefusedError(Code.RESOURCE_EXHAUSTED, "full")

data = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([0, 1, 61_999, 62_000, 62_001, 130_000]).map(lambda size: b"z" * size),
)
modes = st.sampled_from(list(BodyMode))
steps = st.one_of(
    st.builds(
        m.RequestHeaders,
        st.just({":path": "/"}),
        st.booleans(),
        request_body=st.sampled_from([BodyMode.DUPLEX, BodyMode.BUFFERED]) | modes,
        response_body=modes,
    ),
    st.builds(m.RequestBody, data, st.booleans()),
    st.just(m.RequestTrailers()),
    st.builds(
        m.ResponseHeaders,
        st.sampled_from([None, 200, 500]),
        st.booleans(),
        response_body=modes,
        only_observes=st.sampled_from([False, False, True]),
    ),
    st.builds(m.ResponseBody, data, st.booleans()),
    st.just(m.ResponseTrailers()),
    st.builds(m.Closed, st.sampled_from(list(Ending))),
    st.builds(
        RouteDecision,
        st.just("a:1"),
        body=st.none() | data,
        response=st.none() | taps(),
        needs_response_body=st.booleans(),
        skip_response=st.sampled_from([False, False, True]),
    ),
    st.just(REFUSAL),
    st.just(DropReason.EVICTED),
    st.just(m.UnknownMessage()),
)
RANK = {
    m.SendRequestHeaders: 0,
    m.SendRequestHeadersUnchanged: 0,
    m.SendRequestBody: 1,
    m.SendBufferedRequest: 1,
    m.SendRequestTrailers: 2,
    m.SendResponseHeaders: 0,
    m.SendResponseBody: 1,
    m.SendHeldResponseBody: 1,
    m.SendResponseBodyUnchanged: 1,
    m.SendResponseTrailers: 2,
}
DECIDED = (m.SendRequestHeaders, m.SendBufferedRequest)
REQUEST_SIDE = (*DECIDED, m.SendRequestHeadersUnchanged, m.SendRequestBody, m.SendRequestTrailers)
RESPONSE_BODIES = (m.SendResponseBody, m.SendHeldResponseBody, m.SendResponseBodyUnchanged)
RESPONSE_SIDE = (m.SendResponseHeaders, *RESPONSE_BODIES, m.SendResponseTrailers)


HOLDING = (State.RECEIVING, State.AWAITING_BODY)


def walk(
    events: list[object], holding: Sequence[State] = HOLDING
) -> tuple[list[object], list[m.Action]]:
    """Drive a machine through `events` to its end; return the events it took and all its actions.
    Pieces of bodies are held in the states `holding` alone.
    """
    bodies = ByteBudget(max_bytes=MAX_BODY_BYTES)
    machine, taken, actions = StreamMachine(StreamSettings(MAX_BODY_BYTES, budget=bodies)), [], []
    for event in [*events, m.Closed(Ending.END_OF_STREAM)]:
        before = machine.state
        try:
            new = feed(machine, event)
        except ProtocolError:
            assert machine.state is before
            continue
        taken.append(event)
        actions += new
        receiving = machine.state in holding
        assert receiving or bodies.held_bytes == 0
        assert bodies.held_bytes <= MAX_BODY_BYTES
    assert bodies.held_bytes == 0
    return taken, actions


def likely(events: list[object]) -> list[object]:
    """Put a legal beginning before random events, so that walks get past the first state."""
    return [m.RequestHeaders({":path": "/"}), *events]


def likely_buffered(events: list[object]) -> list[object]:
    return [m.RequestHeaders({":path": "/"}, request_body=BodyMode.BUFFERED), *events]


some = st.lists(steps, max_size=14)
walks = some | some.map(likely) | some.map(likely_buffered)


def check_bodies(taken: list[object], actions: list[m.Action]) -> None:
    routes = [action for action in actions if isinstance(action, m.Route)]
    decisions = [event for event in taken if isinstance(event, RouteDecision)]
    sent = [action for action in actions if isinstance(action, m.SendRequestBody)]
    held = [action for action in actions if isinstance(action, m.SendBufferedRequest)]
    assert sum(isinstance(action, DECIDED) for action in actions) == len(decisions)
    if not decisions:
        assert sent == []
        return
    raw, decision, headers = routes[0].request, decisions[0], taken[0]
    if held:
        assert sent == []
        assert held[0].body == decision.body
        assert m.SendRequestHeadersUnchanged() in actions
        return
    had_body = not (headers.end_of_stream or headers.request_body is BodyMode.ABSENT)
    is_replaced = had_body and decision.body is not None
    expected = decision.body if is_replaced else raw.body or b""
    assert b"".join(piece.data for piece in sent) == expected


@examples(300)
@given(walks)
def test_every_walk_keeps_the_promises_of_the_protocol(events: list[object]) -> None:
    taken, actions = walk(events)
    assert sum(isinstance(action, Finish) for action in actions) == 1
    assert sum(isinstance(action, m.Route) for action in actions) <= 1
    for side in (REQUEST_SIDE, RESPONSE_SIDE):
        ranks = [RANK[type(action)] for action in actions if isinstance(action, side)]
        assert ranks == sorted(ranks)
        assert ranks.count(0) <= 1
        assert ranks.count(2) <= 1
    for action in actions:
        if isinstance(action, m.SendRequestBody | m.SendResponseBody):
            assert len(action.data) <= m.MAX_CHUNK_BYTES
    check_bodies(taken, actions)


@examples(300)
@given(walks)
def test_every_walk_ends_what_it_begins(events: list[object]) -> None:
    taken, actions = walk(events)
    immediate = [i for i, action in enumerate(actions) if isinstance(action, m.SendImmediate)]
    assert len(immediate) <= 1
    if immediate:
        after = actions[immediate[0] + 1 :]
        assert not [a for a in after if isinstance(a, REQUEST_SIDE + RESPONSE_SIDE)]
        if not any(isinstance(event, DropReason) for event in taken):
            others = [a for a in actions if isinstance(a, REQUEST_SIDE + RESPONSE_SIDE)]
            assert others in ([], [m.SendRequestHeadersUnchanged()])
        assert isinstance(actions[immediate[0] - 1], Finish)
    for kind in (m.SendRequestBody, m.SendResponseBody):
        pieces = [action for action in actions if isinstance(action, kind)]
        assert not any(piece.end_of_stream for piece in pieces[:-1])


@examples(100)
@given(st.lists(data, max_size=6), st.booleans(), st.none() | st.binary(max_size=9))
def test_any_split_of_a_body_comes_back_whole(
    pieces: list[bytes], by_trailers: bool, replacement: bytes | None
) -> None:
    body = b"".join(pieces)
    events: list[object] = [m.RequestHeaders({":path": "/"}), *map(m.RequestBody, pieces)]
    events.append(m.RequestTrailers() if by_trailers else m.RequestBody(b"", end_of_stream=True))
    events.append(RouteDecision("a:1", body=replacement))
    _, actions = walk(events)
    sent = [action for action in actions if isinstance(action, m.SendRequestBody)]
    if len(body) > MAX_BODY_BYTES:
        assert sent == []
        assert any(isinstance(a, m.SendImmediate) and a.status == 413 for a in actions)
        return
    assert b"".join(piece.data for piece in sent) == (body if replacement is None else replacement)
    assert any(piece.end_of_stream for piece in sent) is not by_trailers


TUNNEL = {":path": "/", "connection": "upgrade", "upgrade": "websocket"}
tunnelled = st.one_of(
    st.builds(m.RequestBody, data, st.sampled_from([False] * 4 + [True])),
    st.builds(m.ResponseHeaders, st.just(101)),
    st.builds(m.ResponseBody, data, st.booleans()),
    st.just(m.RequestTrailers()),
    st.just(RouteDecision("a:1")),
)


@examples(100)
@given(st.lists(tunnelled, max_size=14))
def test_the_data_of_a_tunnel_leaves_whole(events: list[object]) -> None:
    taken, actions = walk([m.RequestHeaders(TUNNEL), *events], [State.ROUTING])
    pieces = [event for event in taken if isinstance(event, m.RequestBody)]
    ends = [at for at, piece in enumerate(pieces) if piece.end_of_stream]
    sent = [action for action in actions if isinstance(action, m.SendRequestBody)]
    if not any(isinstance(action, m.SendRequestHeaders) for action in actions):
        assert sent == []
        return
    came = pieces[: ends[0] + 1] if ends else pieces
    assert b"".join(piece.data for piece in sent) == b"".join(piece.data for piece in came)
    assert [piece.end_of_stream for piece in sent].count(True) == bool(ends)
    assert not any(piece.end_of_stream for piece in sent[:-1])
    assert not any(len(piece.data) > m.MAX_CHUNK_BYTES for piece in sent)


def shown_and_sent(events: list[object], tap: HoldingTap) -> tuple[bytes, bytes]:
    """Return the body of a response after the decision, and the part that left."""
    machine = StreamMachine()
    shown = sent = b""
    for event in events:
        actions = feed(machine, event)
        piece = event.data if isinstance(event, m.ResponseBody) else b""
        shown += piece
        for action in actions:
            if isinstance(action, m.SendResponseBody | m.SendHeldResponseBody):
                sent += action.data
            elif isinstance(action, m.SendResponseBodyUnchanged):
                sent += piece
    return shown, sent


@examples(200)
@given(st.lists(data, max_size=6), taps(), st.booleans(), modes)
def test_a_tap_that_only_holds_back_loses_no_byte_even_when_it_fails(
    pieces: list[bytes], tap: HoldingTap, by_trailers: bool, mode: BodyMode
) -> None:
    if mode is BodyMode.UNKNOWN or (mode is BodyMode.LOCKSTEP and by_trailers):
        return
    if mode in (BodyMode.BUFFERED, BodyMode.PARTIAL):
        pieces = [b"".join(pieces)]
    events: list[object] = [
        m.RequestHeaders({}, response_body=mode),
        m.RequestBody(b"{}", end_of_stream=True),
        RouteDecision("a:1", response=tap, needs_response_body=True),
        m.ResponseHeaders(200),
        *(m.ResponseBody(piece) for piece in pieces),
        m.ResponseTrailers() if by_trailers else m.ResponseBody(b"", end_of_stream=True),
    ]
    shown, sent = shown_and_sent(events, tap)
    assert sent == shown
