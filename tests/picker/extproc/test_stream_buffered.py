"""The stream machine with a proxy that keeps the request's body until it is answered."""

from __future__ import annotations

import pytest

from picker.errors import RefusedError, no_endpoints
from picker.extproc.machine.messages import (
    BodyMode,
    CancelRoute,
    Closed,
    Ending,
    Finish,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    Route,
    SendBufferedRequest,
    SendImmediate,
    SendRequestHeaders,
    SendRequestHeadersUnchanged,
    SendRequestTrailers,
    SendResponseHeaders,
)
from picker.extproc.machine.request_phase import Limits
from picker.extproc.machine.stream import RemoteProtocolError, State, StreamMachine
from picker.types import FinishCause, RawRequest, RouteDecision

HEADERS = {":path": "/v1/completions", "content-length": "4"}
UNMEASURED = {":path": "/v1/completions", "transfer-encoding": "chunked"}
DECISION = RouteDecision("10.0.0.1:8000", (("x-request-id", "7"),))
MARK = SendResponseHeaders((("x-went-into-resp-headers", "true"),))


def begun(
    headers: dict[str, str] = HEADERS,
    *,
    subset_hint: tuple[str, ...] | None = None,
    max_body_bytes: int = 1000,
) -> StreamMachine:
    """A machine that has answered the headers and waits for the body."""
    machine = StreamMachine(Limits(max_body_bytes))
    event = RequestHeaders(headers, subset_hint=subset_hint, request_body=BodyMode.BUFFERED)
    assert machine.receive(event) == [SendRequestHeadersUnchanged()]
    return machine


def routing(headers: dict[str, str] = HEADERS) -> StreamMachine:
    """A machine that waits for a decision."""
    machine = begun(headers)
    machine.receive(RequestBody(b"{ 1}", end_of_stream=True))
    return machine


@pytest.mark.parametrize("last", [True, False])
def test_the_one_body_message_is_the_whole_body(last: bool) -> None:
    """It is routed whatever it says of the stream's end: trailers may be still to come."""
    machine = begun(subset_hint=("10.0.0.1",))
    assert machine.receive(RequestBody(b"{ 1}", last)) == [
        Route(RawRequest(HEADERS, b"{ 1}", ("10.0.0.1",)), is_timed=True)
    ]


def test_a_subset_hint_beside_the_body_replaces_the_first() -> None:
    """As in full duplex."""
    machine = begun(subset_hint=("10.0.0.1",))
    (route,) = machine.receive(RequestBody(b"", True, subset_hint=()))
    assert route == Route(RawRequest(HEADERS, b"", ()), is_timed=True)


def test_an_untouched_body_is_not_sent_back() -> None:
    """The proxy still has it, so the decision is all it needs."""
    assert routing().routed(DECISION) == [
        SendBufferedRequest(DECISION.destination, DECISION.set_headers)
    ]


@pytest.mark.parametrize("body", [b"[longer]", b""])
def test_a_replaced_body_goes_out_with_its_length(body: bytes) -> None:
    """The proxy refuses a body that contradicts the length the client stated."""
    decision = RouteDecision("a:1", body=body)
    assert routing().routed(decision) == [SendBufferedRequest("a:1", (), body, len(body))]


def test_no_length_is_invented_for_a_client_that_stated_none() -> None:
    """A length would make an HTTP/1 upstream drop trailers that are still to come."""
    decision = RouteDecision("a:1", body=b"[new]")
    assert routing(UNMEASURED).routed(decision) == [SendBufferedRequest("a:1", (), b"[new]")]


def test_trailers_come_after_the_decision_and_pass() -> None:
    """The proxy shows them once the body is answered."""
    machine = routing(UNMEASURED)
    machine.routed(DECISION)
    assert machine.receive(RequestTrailers()) == [SendRequestTrailers()]
    with pytest.raises(RemoteProtocolError, match="second"):
        machine.receive(RequestTrailers())


def test_trailers_that_do_not_wait_are_answered_after_the_body() -> None:
    """Replies keep their order even for a proxy that is ahead of them."""
    machine = routing(UNMEASURED)
    assert machine.receive(RequestTrailers()) == []
    decided = SendBufferedRequest(DECISION.destination, DECISION.set_headers)
    assert machine.routed(DECISION) == [decided, SendRequestTrailers()]


def test_trailers_without_a_body_are_refused() -> None:
    """An answer to trailers cannot say where the request goes."""
    finish, reply = begun(UNMEASURED).receive(RequestTrailers())
    assert finish == Finish(FinishCause.REFUSED, 400)
    assert isinstance(reply, SendImmediate)
    assert "needs a body" in reply.body


def test_a_request_without_a_body_is_routed_by_its_headers() -> None:
    """Nothing is to come that could be waited for."""
    machine = StreamMachine()
    event = RequestHeaders(HEADERS, end_of_stream=True, request_body=BodyMode.BUFFERED)
    assert machine.receive(event) == [Route(RawRequest(HEADERS, None, None), is_timed=True)]
    assert machine.routed(DECISION) == [
        SendRequestHeaders(DECISION.destination, DECISION.set_headers)
    ]


def test_a_body_over_the_limit_is_refused() -> None:
    """The picker's own limit holds however large a body the proxy keeps."""
    finish, reply = begun(max_body_bytes=3).receive(RequestBody(b"four", end_of_stream=True))
    assert finish == Finish(FinishCause.REFUSED, 413)
    assert isinstance(reply, SendImmediate)
    assert reply.status == 413


def test_a_refusal_is_told_to_the_client() -> None:
    """What the proxy holds is dropped, and the client hears why."""
    refusal: RefusedError = no_endpoints()
    assert routing().dropped(refusal) == [
        Finish(FinishCause.REFUSED, refusal.status),
        SendImmediate(refusal.status, refusal.body, refusal.headers),
    ]


@pytest.mark.parametrize("status", [408, 413])
def test_a_proxy_that_gives_up_on_the_body_answers_the_client_itself(status: int) -> None:
    """Too slow or too large for the proxy: its error passes, and no endpoint is blamed."""
    machine = begun()
    assert machine.receive(ResponseHeaders(status)) == [MARK]
    actions = machine.receive(ResponseBody(b"why", end_of_stream=True))
    assert actions[0] == Finish(FinishCause.CLIENT_GONE, status)


def test_a_proxy_that_does_not_wait_for_the_decision_cancels_it() -> None:
    """After its own timeout it answers without the picker."""
    assert routing().receive(ResponseHeaders(504)) == [CancelRoute(), MARK]


def test_a_client_that_leaves_before_its_body_is_complete_is_gone() -> None:
    """The headers were answered, but nothing was sent anywhere."""
    machine = begun()
    assert machine.receive(Closed(Ending.CANCELLED)) == [Finish(FinishCause.CLIENT_GONE)]
    assert machine.state is State.CLOSED
