"""Routes, answers, refusals and ends of the stream machine, in full duplex and buffered."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import Code, DropReason, RefusedError
from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Ending, Finish
from picker.extproc.machine.request_phase import StreamSettings
from picker.extproc.machine.stream import SAID_EVERYTHING, RemoteProtocolError, State, StreamMachine
from picker.types import FinishCause, RawRequest, RouteDecision
from tests.support.picker.random_taps import HoldingTap
from tests.support.picker.stream_ways import (
    BUFFERED_HEADERS,
    DECISION,
    HEADERS,
    REFUSAL,
    SKIPPING,
    WAY_TO,
    WAY_TO_BUFFERED,
    fed,
    feed,
)

UNTOUCHED = m.SendResponseHeaders(())
BEGUN, BUFFERED = m.RequestHeaders(HEADERS), BUFFERED_HEADERS
HINTED = m.RequestHeaders(HEADERS, subset_hint=("10.0.0.1",))
BUFFERED_HINTED = m.RequestHeaders(HEADERS, False, ("10.0.0.1",), request_body=BodyMode.BUFFERED)
MEASURED = m.RequestHeaders({"content-length": "4"}, request_body=BodyMode.BUFFERED)
BODY, UNCHANGED = m.RequestBody(b"{}", end_of_stream=True), m.SendRequestHeadersUnchanged()
BODY_OF_TEN = m.RequestBody(bytes(10), end_of_stream=True)
TRAILERS = m.RequestTrailers()
GOES = DECISION.destination
SOCKET = {
    ":method": "GET",
    ":path": "/v1/realtime",
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
}


def said(*events: object, settings: StreamSettings | None = None) -> list[m.Action]:
    machine = StreamMachine(settings or StreamSettings())
    return [action for event in events for action in feed(machine, event)]


WHOLE = {
    "the pieces of a body are joined": (
        (HINTED, m.RequestBody(b"ab"), m.RequestBody(b"cd", True)),
        RawRequest(HEADERS, b"abcd", ("10.0.0.1",)),
    ),
    "a later subset hint replaces the first; no bytes are no body": (
        (HINTED, m.RequestBody(b"", True, subset_hint=())),
        RawRequest(HEADERS, None, ()),
    ),
    "there is no body to wait for": (
        (m.RequestHeaders(HEADERS, end_of_stream=True, subset_hint=("a",)),),
        RawRequest(HEADERS, None, ("a",)),
    ),
    "the proxy shows no bodies": (
        (m.RequestHeaders(HEADERS, request_body=BodyMode.ABSENT),),
        RawRequest(HEADERS, None, None),
    ),
    "trailers end a body": (
        (BEGUN, m.RequestBody(b"body"), TRAILERS),
        RawRequest(HEADERS, b"body", None),
    ),
    "one message is the whole body": (
        (BUFFERED_HINTED, m.RequestBody(b"{ 1}", True)),
        RawRequest(HEADERS, b"{ 1}", ("10.0.0.1",)),
    ),
    "one message is the whole body though trailers are still to come": (
        (BUFFERED, m.RequestBody(b"{ 1}", False)),
        RawRequest(HEADERS, b"{ 1}", None),
    ),
    "a hint beside a buffered body replaces the first": (
        (BUFFERED_HINTED, m.RequestBody(b"", True, subset_hint=())),
        RawRequest(HEADERS, None, ()),
    ),
    "there is no body to keep": (
        (m.RequestHeaders(HEADERS, end_of_stream=True, request_body=BodyMode.BUFFERED),),
        RawRequest(HEADERS, None, None),
    ),
}


@pytest.mark.parametrize(("events", "raw"), WHOLE.values(), ids=WHOLE)
def test_a_request_is_routed_once_it_is_whole(events: tuple[Any, ...], raw: RawRequest) -> None:
    is_timed = events[0].request_body is not BodyMode.DUPLEX
    is_buffered = events[0].request_body is BodyMode.BUFFERED and not events[0].end_of_stream
    assert said(*events) == [*([UNCHANGED] if is_buffered else []), m.Route(raw, is_timed=is_timed)]


NEW = RouteDecision("a:1", (("x-request-id", "7"),), b"[new]")


ANSWERED = {
    "the original body goes back byte for byte": (
        (BEGUN, m.RequestBody(b'{ "a":1}', True)),
        DECISION,
        [m.SendRequestHeaders(GOES, (), 8), m.SendRequestBody(b'{ "a":1}', True)],
    ),
    "a new body goes out instead": (
        (BEGUN, BODY),
        NEW,
        [m.SendRequestHeaders("a:1", NEW.set_headers, 5), m.SendRequestBody(b"[new]", True)],
    ),
    "an empty body is one empty last piece": (
        (BEGUN, m.RequestBody(b"", True)),
        DECISION,
        [m.SendRequestHeaders(GOES), m.SendRequestBody(b"", True)],
    ),
    "there is no body to send back": (
        (m.RequestHeaders(HEADERS, end_of_stream=True),),
        DECISION,
        [m.SendRequestHeaders(GOES)],
    ),
    "trailers carry the end, and no length is set": (
        (BEGUN, m.RequestBody(b"body"), TRAILERS),
        DECISION,
        [m.SendRequestHeaders(GOES), m.SendRequestBody(b"body", False), m.SendRequestTrailers()],
    ),
    "nothing arrived before the trailers": (
        (BEGUN, TRAILERS),
        DECISION,
        [m.SendRequestHeaders(GOES), m.SendRequestTrailers()],
    ),
    "a buffered body is not sent back": (
        (BUFFERED, BODY),
        RouteDecision(GOES, NEW.set_headers),
        [m.SendBufferedRequest(GOES, NEW.set_headers)],
    ),
    "a buffered body is replaced with its length": (
        (MEASURED, BODY),
        NEW,
        [m.SendBufferedRequest("a:1", NEW.set_headers, b"[new]", 5)],
    ),
    "a buffered body is replaced by none": (
        (MEASURED, BODY),
        RouteDecision("a:1", body=b""),
        [m.SendBufferedRequest("a:1", (), b"", 0)],
    ),
    "no length is invented where the client stated none": (
        (BUFFERED, BODY),
        RouteDecision("a:1", body=b"[new]"),
        [m.SendBufferedRequest("a:1", (), b"[new]")],
    ),
    "trailers that do not wait are answered after the body": (
        (BUFFERED, BODY, TRAILERS),
        DECISION,
        [m.SendBufferedRequest(GOES), m.SendRequestTrailers()],
    ),
    "there was no body to keep": (
        (m.RequestHeaders(HEADERS, end_of_stream=True, request_body=BodyMode.BUFFERED),),
        DECISION,
        [m.SendRequestHeaders(GOES)],
    ),
}


@pytest.mark.parametrize(("events", "decision", "replies"), ANSWERED.values(), ids=ANSWERED)
def test_a_decision_is_answered_in_the_order_headers_body_trailers(
    events: tuple[Any, ...], decision: RouteDecision, replies: list[m.Action]
) -> None:
    assert said(*events, decision)[-len(replies) :] == replies


def test_trailers_during_routing_wait_for_the_body_replies() -> None:
    kinds = [type(action) for action in said(BEGUN, BODY, TRAILERS, DECISION)[1:]]
    assert kinds == [m.SendRequestHeaders, m.SendRequestBody, m.SendRequestTrailers]


@pytest.mark.parametrize(
    ("events", "status", "text"),
    [
        pytest.param(
            (BEGUN, m.RequestBody(bytes(10)), m.RequestBody(b"!")), 413, "", id="sum of pieces"
        ),
        pytest.param((BUFFERED, m.RequestBody(bytes(11), True)), 413, "", id="buffered body"),
        pytest.param((BUFFERED, TRAILERS), 400, "needs a body", id="buffered, trailers alone"),
        pytest.param(  # a response in full duplex keeps the proxy from changing the mode
            (m.RequestHeaders(SOCKET, request_body=BodyMode.BUFFERED),),
            500,
            "Upgrades need request bodies in FULL_DUPLEX_STREAMED mode",
            id="a tunnel that the proxy would keep",
        ),
        *(
            pytest.param(
                (m.RequestHeaders(HEADERS, **modes),),
                500,
                "FULL_DUPLEX_STREAMED or BUFFERED",
                id=str(modes),
            )
            for modes in (
                {"request_body": BodyMode.LOCKSTEP},
                {"request_body": BodyMode.PARTIAL},
                {"request_body": BodyMode.UNKNOWN},
                {"response_body": BodyMode.UNKNOWN},
            )
        ),
    ],
)
def test_an_unroutable_request_is_refused_and_its_rest_ignored(
    events: tuple[Any, ...], status: int, text: str
) -> None:
    finish, reply = said(*events, m.RequestBody(bytes(100), True), settings=StreamSettings(10))[-2:]
    assert finish == Finish(FinishCause.REFUSED, status)
    assert reply.status == status
    assert text in reply.body


@pytest.mark.parametrize(
    "events",
    [(BEGUN, m.RequestBody(bytes(4)), m.RequestBody(bytes(6), True)), (BUFFERED, BODY_OF_TEN)],
    ids=["pieces", "buffered body"],
)
def test_a_body_of_exactly_the_limit_is_routed(events: tuple[object, ...]) -> None:
    action = said(*events, settings=StreamSettings(10))[-1]
    assert action.request == RawRequest(HEADERS, bytes(10), None)


@pytest.mark.parametrize("headers", [BEGUN, BUFFERED])
def test_a_refusal_carries_status_text_and_reason(headers: m.RequestHeaders) -> None:
    assert said(headers, BODY, REFUSAL)[-2:] == [
        Finish(FinishCause.REFUSED, 503),
        m.SendImmediate(
            503,
            '{"error": {"message": "Nobody there", "type": "Service Unavailable", "param": null, '
            '"code": 503}}',
            (
                ("x-llm-d-request-dropped-reason", "rejected-no-endpoints"),
                ("content-type", "application/json"),
            ),
        ),
    ]


@pytest.mark.parametrize(
    ("size", "count"), [(0, 1), (61_000, 1), (62_000, 1), (62_001, 2), (63_000, 2), (125_000, 3)]
)
def test_bodies_are_cut_into_chunks_of_at_most_62000_bytes(size: int, count: int) -> None:
    """The sizes are those of the reference picker's table."""
    body = bytes(size)
    assert len(m.body_chunks(body)) == count
    actions = said(
        BEGUN,
        m.RequestBody(body, end_of_stream=True),
        DECISION,
        m.ResponseHeaders(200),
        m.ResponseBody(body, end_of_stream=True),
    )
    for kind in (m.SendRequestBody, m.SendResponseBody):
        pieces = [action for action in actions if isinstance(action, kind)]
        assert b"".join(piece.data for piece in pieces) == body
        assert [piece.end_of_stream for piece in pieces] == [False] * (count - 1) + [True]
        assert max(len(piece.data) for piece in pieces) <= m.MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    "events",
    [
        *((*WAY_TO[state], TRAILERS) for state in (State.RECEIVING, State.ROUTING, State.ROUTED)),
        (BUFFERED, BODY, DECISION, TRAILERS),
    ],
)
def test_a_second_set_of_trailers_is_the_proxys_error(events: tuple[Any, ...]) -> None:
    machine = fed(*events)
    with pytest.raises(RemoteProtocolError, match="second"):
        feed(machine, TRAILERS)


def test_response_pieces_pass_at_once_and_unchanged() -> None:
    machine = fed(*WAY_TO[State.ROUTED])
    assert feed(machine, m.ResponseHeaders(200, served_by="10.0.0.1:8000")) == [UNTOUCHED]
    piece = m.SendResponseBody(b"data: 1\n\n", False)
    assert feed(machine, m.ResponseBody(b"data: 1\n\n")) == [piece]
    assert feed(machine, m.ResponseBody(b"", end_of_stream=True)) == [
        Finish(FinishCause.COMPLETED, 200, "10.0.0.1:8000"),
        m.SendResponseBody(b"", end_of_stream=True),
    ]


@pytest.mark.parametrize("mode", [BodyMode.LOCKSTEP, BodyMode.BUFFERED])
def test_responses_that_the_proxy_holds_are_waved_through(mode: BodyMode) -> None:
    headers = m.RequestHeaders(HEADERS, response_body=mode)
    response = (m.ResponseHeaders(200), m.ResponseBody(bytes(200_000)))
    actions = said(headers, BODY, DECISION, *response)
    assert actions[-2:] == [UNTOUCHED, m.SendResponseBodyUnchanged()]


def test_response_trailers_end_the_response() -> None:
    """A gRPC answer ends with trailers instead of a last body piece."""
    frame = m.ResponseBody(b"frame")
    assert said(*WAY_TO[State.RESPONDING], frame, m.ResponseTrailers())[-2:] == [
        Finish(FinishCause.COMPLETED, 200),
        m.SendResponseTrailers(),
    ]


@pytest.mark.parametrize("status", [408, 413])
@pytest.mark.parametrize("arriving", [(BEGUN, m.RequestBody(b"half")), (BUFFERED,)])
def test_a_proxys_own_error_reply_passes_while_the_request_is_arriving(
    arriving: tuple[Any, ...], status: int
) -> None:
    own = (m.ResponseHeaders(status), m.ResponseBody(b"why", end_of_stream=True))
    assert said(*arriving, *own)[-3:] == [
        UNTOUCHED,
        Finish(FinishCause.CLIENT_GONE, status),
        m.SendResponseBody(b"why", end_of_stream=True),
    ]


def test_a_proxy_that_does_not_wait_for_the_decision_cancels_it() -> None:
    assert said(BUFFERED, BODY, m.ResponseHeaders(504))[-2:] == [m.CancelRoute(), UNTOUCHED]


@pytest.mark.parametrize(
    ("events", "ending", "cause"),
    [
        *(
            (WAY_TO[state], Ending.CANCELLED, FinishCause.CLIENT_GONE)
            for state in (State.START, State.RECEIVING, State.RESPONDING)
        ),
        (WAY_TO[State.ROUTING], Ending.END_OF_STREAM, FinishCause.CLIENT_GONE),
        (WAY_TO[State.ROUTING], Ending.ERROR, FinishCause.RESET),
        ((BUFFERED,), Ending.SHUTDOWN, FinishCause.SHUTDOWN),
    ],
)
def test_an_early_end_finishes_with_its_cause(
    events: tuple[Any, ...], ending: Ending, cause: FinishCause
) -> None:
    machine = fed(*events)
    (finish,) = feed(machine, m.Closed(ending))
    assert finish.cause is cause
    assert feed(machine, m.Closed(ending)) == []


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
    headers = m.RequestHeaders(HEADERS, response_body=BodyMode.ABSENT)
    response = (m.ResponseHeaders(200), m.Closed(ending))
    assert said(headers, BODY, DECISION, *response)[-1] == Finish(cause, 200)


H2C = SOCKET | {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}


@pytest.mark.parametrize(
    ("headers", "is_tunnel"),
    [
        (SOCKET, True),
        ({":method": "CONNECT", ":authority": "a:1"}, True),
        (SOCKET | {"content-length": "0"}, True),
        (H2C, False),
        (SOCKET | {"connection": "keep-alive"}, False),
        (SOCKET | {":method": "POST", "content-length": "2"}, False),
        ({":method": "GET", ":path": "/"}, False),
    ],
)
@pytest.mark.parametrize("mode", [BodyMode.DUPLEX, BodyMode.BUFFERED, BodyMode.ABSENT])
def test_a_tunnel_is_decided_by_its_headers(
    headers: dict[str, str], is_tunnel: bool, mode: BodyMode
) -> None:
    """The client of a tunnel sends nothing until it has the response. A body may follow h2c."""
    begun = m.RequestHeaders(headers, request_body=mode, response_body=BodyMode.ABSENT)
    if not is_tunnel and mode is not BodyMode.ABSENT:
        assert said(begun) == ([UNCHANGED] if mode is BodyMode.BUFFERED else [])
        return
    *_, route, reply = said(begun, DECISION)
    assert route == m.Route(RawRequest(headers, None, None), mode is not BodyMode.DUPLEX)
    hides = is_tunnel and mode is BodyMode.BUFFERED
    assert reply == m.SendRequestHeaders(GOES, hides_bodies=hides)


def test_tunnel_data_passes_both_ways_until_the_end() -> None:
    machine = fed(m.RequestHeaders(SOCKET), m.RequestBody(b"ear"), m.RequestBody(b"ly"))
    sent = m.SendRequestBody
    assert feed(machine, DECISION)[1:] == [sent(b"early", False)]
    assert feed(machine, m.RequestBody(b"a")) == [sent(b"a", False)]
    assert feed(machine, m.ResponseHeaders(101)) == [UNTOUCHED]
    large = m.RequestBody(bytes(62_001))
    assert feed(machine, large) == [sent(bytes(62_000), False), sent(b"\0", False)]
    assert feed(machine, m.ResponseBody(b"b")) == [m.SendResponseBody(b"b", False)]
    finish, last = feed(machine, m.ResponseBody(b"", True))
    assert (finish, last) == (Finish(FinishCause.COMPLETED, 101), m.SendResponseBody(b"", True))
    assert feed(machine, m.RequestBody(b"late", True)) == [sent(b"late", True)]


def test_a_tunnel_that_passes_by_ends_with_its_stream() -> None:
    """A proxy that has hidden the bodies shows nothing but the headers of the response."""
    begun = m.RequestHeaders(SOCKET, False, None, BodyMode.BUFFERED, BodyMode.BUFFERED)
    ended = (m.ResponseHeaders(101), m.Closed(Ending.END_OF_STREAM))
    assert said(begun, DECISION, *ended)[-1] == Finish(FinishCause.COMPLETED, 101)


def test_early_tunnel_data_is_bounded() -> None:
    events = (m.RequestHeaders(SOCKET), m.RequestBody(bytes(11)))
    cancel, finish, reply = said(*events, settings=StreamSettings(10))[-3:]
    assert (cancel, finish) == (m.CancelRoute(), Finish(FinishCause.REFUSED, 413))
    assert isinstance(reply, m.SendImmediate)


MESSAGES, CHAT = {":path": "/v1/messages?beta=true"}, {":path": "/v1/chat/completions"}
ONE_OF_GRPC = {":path": "/vllm.grpc.engine.VllmEngine/Generate", "content-type": "application/grpc"}
WRONG = RefusedError(Code.BAD_REQUEST, "why", param="model", reference="Go's why")
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "refusal", "conformance", "body"),
    [
        (
            *(CHAT, WRONG, False),
            {"error": {"message": "Why", "type": "BadRequestError", "param": "model", "code": 400}},
        ),
        (
            *(MESSAGES, WRONG, False),
            {"type": "error", "error": {"type": "invalid_request_error", "message": "Why"}},
        ),
        (ONE_OF_GRPC, WRONG, False, "Why"),
        (CHAT, WRONG, True, "inference error: BadRequest - Go's why"),
        (MESSAGES, WRONG, True, "inference error: BadRequest - Go's why"),
        (
            *(CHAT, None, False),
            {
                "error": {
                    "message": "The request was stopped to make room for others",
                    "type": "RateLimitError",
                    "param": None,
                    "code": 429,
                }
            },
        ),
        (CHAT, None, True, "request evicted by flow control"),
    ],
)
def test_a_refusal_has_the_form_of_its_api(
    headers: dict[str, str], refusal: RefusedError | None, conformance: bool, body: object
) -> None:
    """None stands for an eviction. A gRPC status message is no JSON, and neither is the
    reference's.
    """
    machine = StreamMachine(StreamSettings(conformance=conformance))
    machine.receive(m.RequestHeaders(headers))
    machine.receive(BODY)
    evicted = refusal is None
    actions = machine.evicted(DropReason.EVICTED) if evicted else machine.dropped(refusal or WRONG)
    reply = actions[-1]
    assert (reply.body if isinstance(body, str) else json.loads(reply.body)) == body
    own = {"x-llm-d-request-dropped-reason": "evicted", "retry-after": "1"} if evicted else {}
    assert dict(reply.headers) == own | ({} if isinstance(body, str) else JSON)


def test_only_conformance_marks_responses() -> None:
    """The reference marks every response."""
    events = (BEGUN, BODY, DECISION, m.ResponseHeaders(200))
    assert said(*events)[-1] == m.SendResponseHeaders(())
    marked = m.SendResponseHeaders((("x-went-into-resp-headers", "true"),))
    assert said(*events, settings=StreamSettings(conformance=True))[-1] == marked


UNSEEN = m.RequestHeaders(HEADERS, response_body=BodyMode.ABSENT)


# Skipped responses


def test_a_response_that_is_none_of_ours_ends_the_stream_with_the_answer() -> None:
    machine = fed(UNSEEN, BODY)
    assert machine.routed(SKIPPING) == [
        Finish(FinishCause.SKIPPED),
        m.SendRequestHeaders(SKIPPING.destination, (), 2),
        m.SendRequestBody(b"{}", end_of_stream=True),
    ]
    assert machine.state in SAID_EVERYTHING
    assert feed(machine, m.ResponseHeaders(200), m.Closed(Ending.END_OF_STREAM)) == []


def test_trailers_of_a_request_whose_response_is_none_of_ours_are_answered_first() -> None:
    """In full duplex a request is not complete without its trailers."""
    machine = fed(UNSEEN, m.RequestBody(b"{}"), m.RequestTrailers())
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
    machine = fed(replace(BUFFERED_HEADERS, response_body=BodyMode.BUFFERED), BODY)
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
    machine = fed(m.ResponseHeaders(401, only_observes=only_observes))
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
    machine = fed(*WAY_TO[state])
    finish, reply = machine.evicted(reason)
    assert finish == Finish(FinishCause.EVICTED, status)
    assert reply.status == 429
    assert reply.headers[:2] == (
        ("x-llm-d-request-dropped-reason", reason.value),
        ("retry-after", "1"),
    )
    assert machine.state in SAID_EVERYTHING
    assert machine.evicted(reason) == []


def test_a_request_that_waits_for_its_decision_waits_no_more() -> None:
    machine = fed(*WAY_TO_BUFFERED[State.ROUTING])
    assert feed(machine, DropReason.EVICTED)[0] == m.CancelRoute()


@pytest.mark.parametrize("state", [State.DONE, State.REFUSED, State.SKIPPED, State.CLOSED])
def test_a_finished_request_cannot_be_evicted(state: State) -> None:
    """The end and the wish to evict may cross."""
    machine = fed(*WAY_TO[state])
    assert machine.evicted(DropReason.EVICTED) == []


# Proxies that only observe, and messages from the future


def test_a_proxy_that_only_observes_is_never_answered() -> None:
    machine = StreamMachine()
    events = [*WAY_TO[State.OBSERVING], BODY, m.RequestTrailers(), m.ResponseHeaders(200)]
    assert [feed(machine, event) for event in events] == [[]] * 4
    assert machine.evicted(DropReason.EVICTED) == []
    assert feed(machine, m.Closed(Ending.END_OF_STREAM)) == [Finish(FinishCause.SKIPPED)]


def test_a_message_of_an_unknown_kind_is_passed_over_in_full_duplex(caplog: Any) -> None:
    machine = fed(m.RequestHeaders(HEADERS))
    assert feed(machine, m.UnknownMessage()) == []
    assert "unknown kind" in caplog.text
    assert machine.state is State.RECEIVING


@pytest.mark.parametrize("mode", [BodyMode.LOCKSTEP, BodyMode.BUFFERED])
def test_a_message_of_an_unknown_kind_to_which_an_answer_is_due_is_an_error(mode: BodyMode) -> None:
    """Silence would let the proxy wait for its timeout."""
    machine = fed(m.RequestHeaders(HEADERS, response_body=mode), BODY, DECISION)
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
    assert reply.status == 431
    assert json.loads(reply.body)["error"]["type"] == "Request Header Fields Too Large"
    assert text in reply.body


def test_headers_at_the_limit_pass() -> None:
    machine = StreamMachine(StreamSettings(max_headers=10, max_header_bytes=100))
    event = m.RequestHeaders(HEADERS, num_headers=10, num_header_bytes=100)
    assert feed(machine, event) == []
