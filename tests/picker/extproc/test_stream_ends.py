"""The ends of a stream: closed, cancelled, broken or evicted, in each state."""

import json

import pytest
from msgspec.structs import replace

from picker.errors import DropReason
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Ending, Finish
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.machine.stream import SAID_EVERYTHING, RemoteProtocolError, State, StreamMachine
from picker.types import FinishCause
from tests.support.picker.random_taps import HoldingTap
from tests.support.picker.stream_ways import (
    BUFFERED_HEADERS,
    DECISION,
    HEADERS,
    SKIPPING,
    WAY_TO,
    WAY_TO_BUFFERED,
    feed,
)

BODY = m.RequestBody(b"{}", end_of_stream=True)
UNSEEN = m.RequestHeaders(HEADERS, response_body=BodyMode.ABSENT)


# Skipped responses


def test_a_response_that_is_none_of_ours_ends_the_stream_with_the_answer() -> None:
    machine = StreamMachine()
    feed(machine, UNSEEN, BODY)
    assert machine.routed(SKIPPING) == [
        Finish(FinishCause.SKIPPED),
        m.SendRequestHeaders(SKIPPING.destination, (), 2),
        m.SendRequestBody(b"{}", end_of_stream=True),
    ]
    assert machine.state in SAID_EVERYTHING
    assert feed(machine, m.ResponseHeaders(200), m.Closed(Ending.END_OF_STREAM)) == []


def test_trailers_of_a_request_whose_response_is_none_of_ours_are_answered_first() -> None:
    """In full duplex a request is not complete without its trailers."""
    machine = StreamMachine()
    feed(machine, UNSEEN, m.RequestBody(b"{}"), m.RequestTrailers())
    assert machine.routed(SKIPPING)[-1] == m.SendRequestTrailers()
    assert machine.state in SAID_EVERYTHING


def test_a_response_in_full_duplex_is_not_left_but_passes_unwatched() -> None:
    """Envoy would lose pieces of a response that the picker left."""
    machine, tap = StreamMachine(), HoldingTap(5, None)
    feed(machine, m.RequestHeaders(HEADERS), BODY)
    replies = machine.routed(replace(SKIPPING, response=tap, needs_response_body=True))
    assert [type(reply) for reply in replies] == [m.SendRequestHeaders, m.SendRequestBody]
    assert machine.state not in SAID_EVERYTHING
    assert feed(machine, m.ResponseHeaders(200)) == [m.SendResponseHeaders(())]
    assert feed(machine, m.ResponseBody(b"x", end_of_stream=True)) == [
        Finish(FinishCause.SKIPPED, 200),
        m.SendResponseBody(b"x", True),
    ]


def test_a_buffered_request_can_skip_its_response_too() -> None:
    machine = StreamMachine()
    feed(machine, replace(BUFFERED_HEADERS, response_body=BodyMode.BUFFERED), BODY)
    assert machine.routed(SKIPPING) == [
        Finish(FinishCause.SKIPPED),
        m.SendBufferedRequest(SKIPPING.destination),
    ]


# Answers of the proxy's own


@pytest.mark.parametrize(
    ("mode", "replies"),
    [
        (BodyMode.DUPLEX, [m.SendResponseBody(b"no", False), m.SendResponseBody(b"pe", True)]),
        (BodyMode.LOCKSTEP, [m.SendResponseBodyUnchanged(), m.SendResponseBodyUnchanged()]),
        (BodyMode.UNKNOWN, [m.SendResponseBodyUnchanged(), m.SendResponseBodyUnchanged()]),
        (BodyMode.BUFFERED, [m.SendResponseBodyUnchanged()]),
        (BodyMode.PARTIAL, [m.SendResponseBodyUnchanged()]),
        (BodyMode.ABSENT, []),
    ],
)
@pytest.mark.parametrize("by_trailers", [False, True])
def test_a_stream_that_begins_with_a_response_passes_it_unchanged(
    mode: BodyMode, replies: list[object], by_trailers: bool
) -> None:
    """A filter before the picker's has answered the client, so no request is there to be blamed."""
    machine = StreamMachine()
    headers = {":status": "401", "x-llm-d-request-dropped-reason": "another's"}
    shown = [b"no", b"pe"] if len(replies) == 2 else [b"nope"][: len(replies)]
    actions = feed(machine, m.ResponseHeaders(401, headers=headers, response_body=mode))
    for at, piece in enumerate(shown):
        is_last = at == len(shown) - 1 and not by_trailers
        actions += feed(machine, m.ResponseBody(piece, end_of_stream=is_last))
    if by_trailers:
        actions += feed(machine, m.ResponseTrailers())
    actions += feed(machine, m.Closed(Ending.END_OF_STREAM))
    finish = Finish(FinishCause.SKIPPED, 401)
    assert [action for action in actions if isinstance(action, Finish)] == [finish]
    sent = [action for action in actions if action != finish]
    if by_trailers and mode is BodyMode.DUPLEX:
        replies = [replies[0], m.SendResponseBody(b"pe", False)]
    assert sent == [
        m.SendResponseHeaders(()),
        *replies,
        *([m.SendResponseTrailers()] if by_trailers else []),
    ]


@pytest.mark.parametrize(
    ("only_observes", "ending", "finish"),
    [
        (False, Ending.CANCELLED, Finish(FinishCause.SKIPPED, 401)),
        (True, Ending.CANCELLED, Finish(FinishCause.SKIPPED)),
        (False, Ending.ERROR, Finish(FinishCause.RESET, 401)),
    ],
)
def test_a_client_that_leaves_an_answer_of_the_proxys_own_is_not_blamed(
    only_observes: bool, ending: Ending, finish: Finish
) -> None:
    machine = StreamMachine()
    feed(machine, m.ResponseHeaders(401, only_observes=only_observes))
    assert feed(machine, m.Closed(ending)) == [finish]


# Eviction


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (State.START, 429, DropReason.EVICTED),
        (State.RECEIVING, 429, DropReason.EVICTED),
        *((State.ROUTED, 429, reason) for reason in DropReason),
        (State.RESPONDING, 200, DropReason.EVICTED),  # what the client has been sent already
    ],
)
def test_an_evicted_request_is_answered_with_the_reason(
    state: State, status: int, reason: DropReason
) -> None:
    machine = StreamMachine()
    feed(machine, *WAY_TO[state])
    finish, reply = machine.evicted(reason)
    assert finish == Finish(FinishCause.EVICTED, status)
    assert isinstance(reply, m.SendImmediate)
    assert reply.status == 429
    assert reply.headers[:2] == (
        ("x-llm-d-request-dropped-reason", reason.value),
        ("retry-after", "1"),
    )
    assert machine.state in SAID_EVERYTHING
    assert machine.evicted(reason) == []


def test_a_request_that_waits_for_its_decision_waits_no_more() -> None:
    machine = StreamMachine()
    feed(machine, *WAY_TO_BUFFERED[State.ROUTING])
    assert feed(machine, DropReason.EVICTED)[0] == m.CancelRoute()


@pytest.mark.parametrize("state", [State.DONE, State.REFUSED, State.SKIPPED, State.CLOSED])
def test_a_finished_request_cannot_be_evicted(state: State) -> None:
    """The end and the wish to evict may cross."""
    machine = StreamMachine()
    feed(machine, *WAY_TO[state])
    assert machine.evicted(DropReason.EVICTED) == []


# Proxies that only observe, and messages from the future


def test_a_proxy_that_only_observes_is_never_answered() -> None:
    machine = StreamMachine()
    events = [*WAY_TO[State.OBSERVING], BODY, m.RequestTrailers(), m.ResponseHeaders(200)]
    assert [feed(machine, event) for event in events] == [[]] * 4
    assert machine.evicted(DropReason.EVICTED) == []
    assert feed(machine, m.Closed(Ending.END_OF_STREAM)) == [Finish(FinishCause.SKIPPED)]


def test_a_message_of_an_unknown_kind_is_passed_over_in_full_duplex(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = StreamMachine()
    feed(machine, m.RequestHeaders(HEADERS))
    assert feed(machine, m.UnknownMessage()) == []
    assert "unknown kind" in caplog.text
    assert machine.state is State.RECEIVING


@pytest.mark.parametrize("mode", [BodyMode.LOCKSTEP, BodyMode.BUFFERED])
def test_a_message_of_an_unknown_kind_to_which_an_answer_is_due_is_an_error(mode: BodyMode) -> None:
    """Silence would let the proxy wait for its timeout."""
    machine = StreamMachine()
    feed(machine, m.RequestHeaders(HEADERS, response_body=mode), BODY, DECISION)
    assert feed(machine, m.UnknownMessage()) == []
    feed(machine, m.ResponseHeaders(200))
    with pytest.raises(RemoteProtocolError, match="unknown kind"):
        feed(machine, m.UnknownMessage())


def test_a_stream_that_begins_with_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError):
        feed(StreamMachine(), m.UnknownMessage())


# Limits of headers and modes


@pytest.mark.parametrize("mode", [BodyMode.DUPLEX, BodyMode.BUFFERED])
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(
    ("count", "size", "text"), [(11, 0, "more than 10 headers"), (10, 101, "exceed 100 bytes")]
)
def test_too_many_headers_are_refused_with_431(
    mode: BodyMode, end: bool, count: int, size: int, text: str
) -> None:
    machine = StreamMachine(StreamSettings(max_headers=10, max_header_bytes=100))
    event = m.RequestHeaders(
        HEADERS, end, request_body=mode, num_headers=count, num_header_bytes=size
    )
    finish, reply = feed(machine, event)
    assert finish == Finish(FinishCause.REFUSED, 431)
    assert isinstance(reply, m.SendImmediate)
    assert reply.status == 431
    assert json.loads(reply.body)["error"]["type"] == "Request Header Fields Too Large"
    assert text in reply.body


def test_headers_at_the_limit_pass() -> None:
    machine = StreamMachine(StreamSettings(max_headers=10, max_header_bytes=100))
    event = m.RequestHeaders(HEADERS, num_headers=10, num_header_bytes=100)
    assert feed(machine, event) == []
