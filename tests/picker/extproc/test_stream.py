"""The stream machine in full duplex: what each step does, beyond its table."""

from __future__ import annotations

import pytest
from stream_ways import DECISION, HEADERS, REFUSAL, WAY_TO, feed

from picker.extproc.machine.messages import (
    MAX_CHUNK_BYTES,
    BodyMode,
    Closed,
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
    body_chunks,
)
from picker.extproc.machine.request_phase import Limits
from picker.extproc.machine.stream import RemoteProtocolError, State, StreamMachine
from picker.types import FinishCause, RawRequest, RouteDecision

MARK = SendResponseHeaders((("x-went-into-resp-headers", "true"),))
BODY_DONE = (RequestHeaders(HEADERS), RequestBody(b"{}", end_of_stream=True))


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
    assert actions == [Route(RawRequest(HEADERS, None, None), is_timed=True)]


def test_a_proxy_that_sends_bodies_in_lockstep_is_told_so_instead_of_hanging() -> None:
    """Such a proxy sends a piece on before the next one is seen: too early to decide, so a 500."""
    machine = StreamMachine()
    finish, reply = feed(machine, RequestHeaders(HEADERS, request_body=BodyMode.LOCKSTEP))
    assert finish == Finish(FinishCause.REFUSED, 500)
    assert isinstance(reply, SendImmediate)
    assert "FULL_DUPLEX_STREAMED or BUFFERED" in reply.body


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
    machine = StreamMachine(Limits(max_body_bytes=10))
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


@pytest.mark.parametrize("mode", [BodyMode.LOCKSTEP, BodyMode.BUFFERED])
def test_responses_that_the_proxy_holds_are_waved_through(mode: BodyMode) -> None:
    """A proxy that holds what it shows is told to go on, one reply per message."""
    machine = StreamMachine()
    feed(machine, RequestHeaders(HEADERS, response_body=mode))
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
