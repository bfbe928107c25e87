"""The stream machine: every pair of state and event, and what each legal one does."""

from __future__ import annotations

import itertools

import pytest

from picker.errors import Code, DropReason, RefusedError
from picker.extproc.messages import (
    Action,
    BodyMode,
    CancelRoute,
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
    SendImmediate,
    SendRequestBody,
    SendRequestHeaders,
    SendRequestTrailers,
    SendResponseBody,
    SendResponseBodyUnchanged,
    SendResponseHeaders,
    SendResponseTrailers,
)
from picker.extproc.stream import (
    MAX_CHUNK_BYTES,
    LocalProtocolError,
    RemoteProtocolError,
    State,
    StreamMachine,
    body_chunks,
)
from picker.types import FinishCause, RawRequest, RouteDecision

HEADERS = {":path": "/v1/completions", ":method": "POST"}
DECISION = RouteDecision("10.0.0.1:8000")
REFUSAL = RefusedError(Code.SERVICE_UNAVAILABLE, "nobody there", DropReason.NO_ENDPOINTS)
MARK = SendResponseHeaders((("x-went-into-resp-headers", "true"),))

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
}


def feed(machine: StreamMachine, *events: object) -> list[Action]:
    """Give the machine events, its own shell's included; the actions of the last one."""
    actions: list[Action] = []
    for event in events:
        if isinstance(event, Routed):
            actions = machine.routed(event.decision)
        elif isinstance(event, Dropped):
            actions = machine.dropped(event.refusal)
        else:
            actions = machine.receive(event)  # type: ignore[arg-type]
    return actions


BODY_DONE = (RequestHeaders(HEADERS), RequestBody(b"{}", end_of_stream=True))
WAY_TO = {
    State.START: (),
    State.RECEIVING: (RequestHeaders(HEADERS),),
    State.ROUTING: BODY_DONE,
    State.ROUTED: (*BODY_DONE, Routed(DECISION)),
    State.RESPONDING: (*BODY_DONE, Routed(DECISION), ResponseHeaders(200)),
    State.DONE: (*BODY_DONE, Routed(DECISION), ResponseHeaders(204, end_of_stream=True)),
    State.REFUSED: (*BODY_DONE, Dropped(REFUSAL)),
    State.CLOSED: (Closed(Ending.CANCELLED),),
}

# (state, event) -> the kinds of the actions and the next state. What is not here is an error.
LEGAL: dict[tuple[State, type], tuple[tuple[type, ...], State]] = {
    (State.START, RequestHeaders): ((), State.RECEIVING),
    (State.START, Closed): ((Finish,), State.CLOSED),
    (State.RECEIVING, RequestBody): ((Route,), State.ROUTING),
    (State.RECEIVING, RequestTrailers): ((Route,), State.ROUTING),
    (State.RECEIVING, ResponseHeaders): ((SendResponseHeaders,), State.RESPONDING),
    (State.RECEIVING, Closed): ((Finish,), State.CLOSED),
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
    (State.DONE, Closed): ((), State.CLOSED),
    (State.REFUSED, RequestBody): ((), State.REFUSED),
    (State.REFUSED, RequestTrailers): ((), State.REFUSED),
    (State.REFUSED, ResponseHeaders): ((), State.REFUSED),
    (State.REFUSED, ResponseBody): ((), State.REFUSED),
    (State.REFUSED, ResponseTrailers): ((), State.REFUSED),
    (State.REFUSED, Closed): ((), State.CLOSED),
    (State.CLOSED, Closed): ((), State.CLOSED),
}
EVERY_PAIR = list(itertools.product(State, EVENTS))


@pytest.mark.parametrize(
    ("state", "kind"), EVERY_PAIR, ids=[f"{s.value}-{k.__name__}" for s, k in EVERY_PAIR]
)
def test_every_pair_of_state_and_event_does_what_the_table_says(state: State, kind: type) -> None:
    """Each pair either gives the actions and the state of the table, or is its culprit's error."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[state])
    assert machine.state is state
    expected = LEGAL.get((state, kind))
    if expected is None:
        culprit = LocalProtocolError if kind in (Routed, Dropped) else RemoteProtocolError
        with pytest.raises(culprit, match=kind.__name__):
            feed(machine, EVENTS[kind])
        assert machine.state is state
        return
    actions = feed(machine, EVENTS[kind])
    assert (tuple(map(type, actions)), machine.state) == expected


def test_the_body_is_joined_and_routed_with_headers_and_subset_hint() -> None:
    """`Route` carries everything that arrived, and nothing is answered before."""
    machine = StreamMachine()
    assert feed(machine, RequestHeaders(HEADERS, subset_hint=("10.0.0.1",))) == []
    assert feed(machine, RequestBody(b"ab")) == []
    assert feed(machine, RequestBody(b"cd", end_of_stream=True)) == [
        Route(RawRequest(HEADERS, b"abcd", ("10.0.0.1",)))
    ]


def test_a_later_subset_hint_replaces_the_first() -> None:
    """A body message may narrow the choice anew, also to nothing."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS, subset_hint=("10.0.0.1",)))
    actions = feed(machine, RequestBody(b"", end_of_stream=True, subset_hint=()))
    assert actions == [Route(RawRequest(HEADERS, b"", ()))]


def test_a_request_without_a_body_is_routed_at_once_and_answered_with_headers_alone() -> None:
    """End of stream on the headers means there is no body to hold or to send back."""
    machine = StreamMachine()
    routed = feed(machine, RequestHeaders(HEADERS, end_of_stream=True, subset_hint=("a",)))
    assert routed == [Route(RawRequest(HEADERS, None, ("a",)))]
    assert machine.routed(DECISION) == [SendRequestHeaders(DECISION.destination)]


def test_a_proxy_that_shows_no_request_bodies_gets_its_requests_routed_without_them() -> None:
    """With request_body_mode NONE no body will come, so none is waited for."""
    machine = StreamMachine()
    actions = feed(machine, RequestHeaders(HEADERS, request_body=BodyMode.ABSENT))
    assert actions == [Route(RawRequest(HEADERS, None, None))]


def test_a_proxy_that_sends_bodies_in_lockstep_is_told_so_instead_of_hanging() -> None:
    """Such a proxy waits for the header reply before it sends the body: a deadlock, so a 500."""
    machine = StreamMachine()
    finish, reply = feed(machine, RequestHeaders(HEADERS, request_body=BodyMode.LOCKSTEP))
    assert finish == Finish(FinishCause.REFUSED, 500)
    assert isinstance(reply, SendImmediate)
    assert "FULL_DUPLEX_STREAMED" in reply.body


def test_the_original_body_goes_back_byte_for_byte_with_its_length() -> None:
    """A decision without a body of its own leaves the client's untouched."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestBody(b'{ "a":1}', end_of_stream=True))
    assert machine.routed(DECISION) == [
        SendRequestHeaders(DECISION.destination, (), 8),
        SendRequestBody(b'{ "a":1}', end_of_stream=True),
    ]


def test_a_replaced_body_goes_out_instead() -> None:
    """A decision with a body replaces the client's, length included."""
    machine = StreamMachine()
    feed(machine, *BODY_DONE)
    decision = RouteDecision("a:1", (("x-request-id", "7"),), b"[new]")
    assert machine.routed(decision) == [
        SendRequestHeaders("a:1", (("x-request-id", "7"),), 5),
        SendRequestBody(b"[new]", end_of_stream=True),
    ]


def test_an_empty_body_is_one_empty_last_chunk() -> None:
    """The proxy needs to see the end of the body even when nothing is in it."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestBody(b"", end_of_stream=True))
    assert machine.routed(DECISION) == [
        SendRequestHeaders(DECISION.destination),
        SendRequestBody(b"", end_of_stream=True),
    ]


@pytest.mark.parametrize(
    ("size", "count"), [(0, 1), (61_000, 1), (62_000, 1), (62_001, 2), (63_000, 2), (125_000, 3)]
)
def test_bodies_are_cut_into_chunks_of_at_most_62000_bytes(size: int, count: int) -> None:
    """The sizes of the reference picker's table, in both directions, end of stream on the last."""
    body = bytes(size)
    assert len(body_chunks(body)) == count
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestBody(body, end_of_stream=True))
    sent = [action for action in machine.routed(DECISION) if isinstance(action, SendRequestBody)]
    feed(machine, ResponseHeaders(200))
    replies = feed(machine, ResponseBody(body, end_of_stream=True))
    passed = [action for action in replies if isinstance(action, SendResponseBody)]
    for pieces in (sent, passed):
        assert b"".join(piece.data for piece in pieces) == body
        assert [piece.end_of_stream for piece in pieces] == [False] * (count - 1) + [True]
        assert max(len(piece.data) for piece in pieces) <= MAX_CHUNK_BYTES


def test_a_body_over_the_limit_is_refused_with_413_and_its_rest_ignored() -> None:
    """The limit holds for the sum of the pieces, not for each."""
    machine = StreamMachine(max_body_bytes=10)
    feed(machine, RequestHeaders(HEADERS))
    assert feed(machine, RequestBody(bytes(10))) == []
    finish, reply = feed(machine, RequestBody(b"!"))
    assert finish == Finish(FinishCause.REFUSED, 413)
    assert isinstance(reply, SendImmediate)
    assert reply.status == 413
    assert feed(machine, RequestBody(bytes(100), end_of_stream=True)) == []


def test_a_refusal_carries_status_text_and_reason() -> None:
    """The client learns the code, the message and why the request was dropped."""
    machine = StreamMachine()
    feed(machine, *BODY_DONE)
    assert machine.dropped(REFUSAL) == [
        Finish(FinishCause.REFUSED, 503),
        SendImmediate(
            503,
            "inference error: ServiceUnavailable - nobody there",
            (("x-llm-d-request-dropped-reason", "rejected-no-endpoints"),),
        ),
    ]


def test_trailers_that_end_the_body_are_answered_after_it_and_carry_its_end() -> None:
    """The last body chunk is not the end of the request when trailers follow; no length is set."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestBody(b"body"))
    assert feed(machine, RequestTrailers()) == [Route(RawRequest(HEADERS, b"body", None))]
    assert machine.routed(DECISION) == [
        SendRequestHeaders(DECISION.destination),
        SendRequestBody(b"body", end_of_stream=False),
        SendRequestTrailers(),
    ]


def test_trailers_without_any_body_are_answered_without_a_chunk() -> None:
    """Nothing arrived, so nothing is sent back before the trailers."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestTrailers())
    assert machine.routed(DECISION) == [
        SendRequestHeaders(DECISION.destination),
        SendRequestTrailers(),
    ]


def test_trailers_during_routing_wait_for_the_body_replies() -> None:
    """Replies leave in the order headers, body, trailers, whenever the trailers came."""
    machine = StreamMachine()
    feed(machine, *BODY_DONE, RequestTrailers())
    kinds = [type(action) for action in machine.routed(DECISION)]
    assert kinds == [SendRequestHeaders, SendRequestBody, SendRequestTrailers]


@pytest.mark.parametrize("first_in", [State.RECEIVING, State.ROUTING, State.ROUTED])
def test_a_second_set_of_trailers_is_the_proxys_error(first_in: State) -> None:
    """HTTP has one set of trailers per message."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[first_in], RequestTrailers())
    with pytest.raises(RemoteProtocolError, match="second"):
        feed(machine, RequestTrailers())


def test_response_pieces_pass_at_once_and_unchanged() -> None:
    """Nothing of a response is held back, so tokens stream."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[State.ROUTED])
    assert feed(machine, ResponseHeaders(200, served_by="10.0.0.1:8000")) == [MARK]
    assert feed(machine, ResponseBody(b"data: 1\n\n")) == [SendResponseBody(b"data: 1\n\n", False)]
    assert feed(machine, ResponseBody(b"", end_of_stream=True)) == [
        Finish(FinishCause.COMPLETED, 200, "10.0.0.1:8000"),
        SendResponseBody(b"", end_of_stream=True),
    ]


def test_response_pieces_in_lockstep_are_waved_through() -> None:
    """A proxy that holds each piece is told to go on, one reply per message."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS, response_body=BodyMode.LOCKSTEP))
    feed(machine, RequestBody(b"{}", end_of_stream=True), Routed(DECISION), ResponseHeaders(200))
    assert feed(machine, ResponseBody(bytes(200_000))) == [SendResponseBodyUnchanged()]


def test_response_trailers_end_the_response() -> None:
    """A gRPC answer ends with trailers instead of a last body piece."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[State.RESPONDING], ResponseBody(b"frame"))
    assert feed(machine, ResponseTrailers()) == [
        Finish(FinishCause.COMPLETED, 200),
        SendResponseTrailers(),
    ]


def test_a_proxys_own_error_reply_passes_while_the_request_is_arriving() -> None:
    """A client too slow for the proxy sees the proxy's 408, and no endpoint is blamed."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS), RequestBody(b"half"))
    assert feed(machine, ResponseHeaders(408)) == [MARK]
    assert feed(machine, ResponseBody(b"stream timeout", end_of_stream=True)) == [
        Finish(FinishCause.CLIENT_GONE, 408),
        SendResponseBody(b"stream timeout", end_of_stream=True),
    ]


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        (Ending.END_OF_STREAM, FinishCause.CLIENT_GONE),
        (Ending.CANCELLED, FinishCause.CLIENT_GONE),
        (Ending.ERROR, FinishCause.RESET),
        (Ending.SHUTDOWN, FinishCause.SHUTDOWN),
    ],
)
@pytest.mark.parametrize("state", [State.START, State.RECEIVING, State.ROUTING, State.RESPONDING])
def test_an_early_end_finishes_with_its_cause(
    state: State, ending: Ending, cause: FinishCause
) -> None:
    """Each way to end before the response is complete has its own cause."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[state])
    (finish,) = feed(machine, Closed(ending))
    assert isinstance(finish, Finish)
    assert finish.cause is cause
    assert feed(machine, Closed(ending)) == []


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        (Ending.END_OF_STREAM, FinishCause.COMPLETED),
        (Ending.CANCELLED, FinishCause.COMPLETED),
        (Ending.ERROR, FinishCause.RESET),
    ],
)
def test_without_response_bodies_the_end_of_the_stream_is_the_end_of_the_response(
    ending: Ending, cause: FinishCause
) -> None:
    """With response_body_mode NONE the proxy shows the response headers and then closes."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS, response_body=BodyMode.ABSENT))
    feed(machine, RequestBody(b"{}", end_of_stream=True), Routed(DECISION), ResponseHeaders(200))
    assert feed(machine, Closed(ending)) == [Finish(cause, 200)]
