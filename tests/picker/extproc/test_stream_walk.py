"""Random walks over the stream machine: what holds for every sequence, legal or not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from picker.errors import Code, RefusedError
from picker.extproc.messages import (
    MAX_CHUNK_BYTES,
    Action,
    BodyMode,
    Closed,
    Dropped,
    Ending,
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
)
from picker.extproc.request_phase import Limits
from picker.extproc.stream import ProtocolError, StreamMachine
from picker.types import RouteDecision

MAX_BODY_BYTES = 200_000
REFUSAL = RefusedError(Code.RESOURCE_EXHAUSTED, "full")

data = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([0, 1, 61_999, 62_000, 62_001, 130_000]).map(lambda size: b"z" * size),
)
modes = st.sampled_from(list(BodyMode))
steps = st.one_of(
    st.builds(
        RequestHeaders,
        st.just({":path": "/"}),
        st.booleans(),
        request_body=st.sampled_from([BodyMode.DUPLEX, BodyMode.BUFFERED]) | modes,
        response_body=modes,
    ),
    st.builds(RequestBody, data, st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, st.sampled_from([None, 200, 500]), st.booleans()),
    st.builds(ResponseBody, data, st.booleans()),
    st.just(ResponseTrailers()),
    st.builds(Closed, st.sampled_from(list(Ending))),
    st.builds(Routed, st.builds(RouteDecision, st.just("a:1"), body=st.none() | data)),
    st.just(Dropped(REFUSAL)),
)
RANK = {
    SendRequestHeaders: 0,
    SendRequestHeadersUnchanged: 0,
    SendRequestBody: 1,
    SendBufferedRequest: 1,
    SendRequestTrailers: 2,
    SendResponseHeaders: 0,
    SendResponseBody: 1,
    SendResponseTrailers: 2,
}
DECIDED = (SendRequestHeaders, SendBufferedRequest)
REQUEST_SIDE = (*DECIDED, SendRequestHeadersUnchanged, SendRequestBody, SendRequestTrailers)
RESPONSE_SIDE = (SendResponseHeaders, SendResponseBody, SendResponseTrailers)


def walk(events: list[object]) -> tuple[list[object], list[Action]]:
    """Drive a machine through `events` to its end; the events it took, and all its actions."""
    machine, taken, actions = StreamMachine(Limits(MAX_BODY_BYTES)), [], []
    for event in [*events, Closed(Ending.END_OF_STREAM)]:
        before = machine.state
        try:
            if isinstance(event, Routed):
                new = machine.routed(event.decision)
            elif isinstance(event, Dropped):
                new = machine.dropped(event.refusal)
            else:
                new = machine.receive(event)  # type: ignore[arg-type]
        except ProtocolError:
            assert machine.state is before
            continue
        taken.append(event)
        actions += new
    return taken, actions


def likely(events: list[object]) -> list[object]:
    """Put a legal beginning before random events, so that walks get past the first state."""
    return [RequestHeaders({":path": "/"}), *events]


def likely_buffered(events: list[object]) -> list[object]:
    """The same with a proxy that keeps the body."""
    return [RequestHeaders({":path": "/"}, request_body=BodyMode.BUFFERED), *events]


some = st.lists(steps, max_size=14)
walks = some | some.map(likely) | some.map(likely_buffered)


def check_bodies(taken: list[object], actions: list[Action]) -> None:
    """What is sent back of a request body is the routed body or its replacement, whole."""
    routes = [action for action in actions if isinstance(action, Route)]
    decisions = [event.decision for event in taken if isinstance(event, Routed)]
    sent = [action for action in actions if isinstance(action, SendRequestBody)]
    held = [action for action in actions if isinstance(action, SendBufferedRequest)]
    assert sum(isinstance(action, DECIDED) for action in actions) == len(decisions)
    if not decisions:
        assert sent == []
        return
    raw, decision = routes[0].request, decisions[0]
    if held:
        assert sent == []
        assert held[0].body == decision.body
        assert SendRequestHeadersUnchanged() in actions
        return
    replacement = decision.body if decision.body is not None and raw.body is not None else None
    expected = raw.body or b"" if replacement is None else replacement
    assert b"".join(piece.data for piece in sent) == expected


@settings(deadline=None, max_examples=300)
@given(walks)
def test_every_walk_keeps_the_promises_of_the_protocol(events: list[object]) -> None:
    """One finish, one decision at most, replies in order, no byte lost, no chunk too large."""
    taken, actions = walk(events)
    assert sum(isinstance(action, Finish) for action in actions) == 1
    assert sum(isinstance(action, Route) for action in actions) <= 1
    for side in (REQUEST_SIDE, RESPONSE_SIDE):
        ranks = [RANK[type(action)] for action in actions if isinstance(action, side)]
        assert ranks == sorted(ranks)
        assert ranks.count(0) <= 1
        assert ranks.count(2) <= 1
    for action in actions:
        if isinstance(action, SendRequestBody | SendResponseBody):
            assert len(action.data) <= MAX_CHUNK_BYTES
    check_bodies(taken, actions)


@settings(deadline=None, max_examples=300)
@given(walks)
def test_every_walk_ends_what_it_begins(events: list[object]) -> None:
    """Nothing of the request is sent after a refusal or beside it, and each end comes once."""
    _, actions = walk(events)
    immediate = [i for i, action in enumerate(actions) if isinstance(action, SendImmediate)]
    assert len(immediate) <= 1
    if immediate:
        others = [a for a in actions if isinstance(a, REQUEST_SIDE + RESPONSE_SIDE)]
        assert others in ([], [SendRequestHeadersUnchanged()])
        assert isinstance(actions[immediate[0] - 1], Finish)
    for kind in (SendRequestBody, SendResponseBody):
        pieces = [action for action in actions if isinstance(action, kind)]
        assert not any(piece.end_of_stream for piece in pieces[:-1])


@settings(deadline=None, max_examples=100)
@given(st.lists(data, max_size=6), st.booleans(), st.none() | st.binary(max_size=9))
def test_any_split_of_a_body_comes_back_whole(
    pieces: list[bytes], by_trailers: bool, replacement: bytes | None
) -> None:
    """How the proxy cut the body changes nothing of what leaves, unless it is too large."""
    body = b"".join(pieces)
    events: list[object] = [RequestHeaders({":path": "/"}), *map(RequestBody, pieces)]
    events.append(RequestTrailers() if by_trailers else RequestBody(b"", end_of_stream=True))
    events.append(Routed(RouteDecision("a:1", body=replacement)))
    _, actions = walk(events)
    sent = [action for action in actions if isinstance(action, SendRequestBody)]
    if len(body) > MAX_BODY_BYTES:
        assert sent == []
        assert any(isinstance(a, SendImmediate) and a.status == 413 for a in actions)
        return
    assert b"".join(piece.data for piece in sent) == (body if replacement is None else replacement)
    assert any(piece.end_of_stream for piece in sent) is not by_trailers
