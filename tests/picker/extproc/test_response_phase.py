"""The effect of a tap on a response: in each mode, whole, failing, and cut off."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import BodyMode, Ending, Finish
from picker.extproc.machine.stream import StreamMachine
from picker.types import BodyReport, FinishCause, Metadata, ResponseHead, RouteDecision

COST: Metadata = {"envoy.lb": {"x-cost": 10}}
LENGTH = {":status": "200", "content-length": "5"}


@dataclass
class Shouting:
    fails_at: str = ""
    held: bytes = b""
    seen: list[object] = field(default_factory=list)

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        self.seen.append(head)
        if self.fails_at == "head":
            raise ZeroDivisionError
        return (("x-session-token", "abc"),)

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        self.seen.append((data, is_last))
        if self.fails_at == "body":
            raise ZeroDivisionError
        self.held += data.upper()
        if is_last:
            out, self.held = self.held, b""
            return out, COST
        out, self.held = self.held[:-1], self.held[-1:]
        return out, {}

    def report(self, report: BodyReport) -> None:
        self.seen.append(report)
        if self.fails_at == "report":
            raise ZeroDivisionError

    def end(self) -> bytes:
        self.seen.append("end")
        if self.fails_at == "end":
            raise ZeroDivisionError
        out, self.held = self.held, b""
        return out


def routed(
    tap: Shouting | None,
    mode: BodyMode = BodyMode.DUPLEX,
    *,
    request_body: BodyMode = BodyMode.DUPLEX,
    changes: bool = True,
) -> StreamMachine:
    machine = StreamMachine()
    machine.receive(m.RequestHeaders({}, request_body=request_body, response_body=mode))
    machine.receive(m.RequestBody(b"{}", end_of_stream=True))
    machine.routed(RouteDecision("a:1", response=tap, needs_response_body=changes))
    return machine


def responding(*args: Any, **kwargs: Any) -> StreamMachine:
    machine = routed(*args, **kwargs)
    machine.receive(m.ResponseHeaders(200))
    return machine


def bytes_of(actions: list[m.Action]) -> bytes:
    return b"".join(a.data for a in actions if isinstance(a, m.SendResponseBody))


def test_the_tap_sees_the_head_and_its_headers_go_out() -> None:
    tap = Shouting()
    headers = {":status": "503", "content-type": "text/plain"}
    event = m.ResponseHeaders(503, False, "10.0.0.1:8000", headers, has_destination_metadata=True)
    actions = routed(tap).receive(event)
    assert actions == [m.SendResponseHeaders((("x-session-token", "abc"),))]
    assert tap.seen == [ResponseHead(503, headers, "10.0.0.1:8000", True)]


@pytest.mark.parametrize(
    ("mode", "changes", "shows_body"),
    [
        (BodyMode.ABSENT, False, False),
        (BodyMode.ABSENT, True, True),  # the picker has it shown
        (BodyMode.BUFFERED, False, True),
    ],
)
def test_the_tap_knows_whether_a_body_follows(
    mode: BodyMode, changes: bool, shows_body: bool
) -> None:
    tap = Shouting()
    machine = routed(tap, mode, request_body=BodyMode.BUFFERED, changes=changes)
    machine.receive(m.ResponseHeaders(200))
    head = ResponseHead(200, shows_body=shows_body, shows_first_piece=shows_body)
    assert tap.seen == [head]


def test_changed_pieces_go_out_and_what_is_held_back_follows() -> None:
    machine = responding(Shouting())
    assert machine.receive(m.ResponseBody(b"abc")) == [m.SendResponseBody(b"AB", False)]
    assert machine.receive(m.ResponseBody(b"d", end_of_stream=True)) == [
        Finish(FinishCause.COMPLETED, 200),
        m.SendResponseBody(b"CD", True, COST),
    ]


def test_a_piece_that_is_all_held_back_is_not_answered() -> None:
    """In full duplex the proxy does not wait for an answer."""
    machine = responding(Shouting())
    assert machine.receive(m.ResponseBody(b"a")) == []
    assert bytes_of(machine.receive(m.ResponseBody(b"", end_of_stream=True))) == b"A"


def test_a_long_output_is_cut_and_ends_once() -> None:
    machine = responding(Shouting())
    actions = machine.receive(m.ResponseBody(b"x" * 130_000, end_of_stream=True))[1:]
    assert bytes_of(actions) == b"X" * 130_000
    pieces = [a for a in actions if isinstance(a, m.SendResponseBody)]
    assert max(len(piece.data) for piece in pieces) <= m.MAX_CHUNK_BYTES
    assert [piece.end_of_stream for piece in pieces] == [False, False, True]
    assert [dict(piece.metadata) for piece in pieces] == [{}, {}, dict(COST)]


def test_bytes_held_back_go_before_trailers_without_the_end_of_the_stream() -> None:
    machine = responding(Shouting())
    machine.receive(m.ResponseBody(b"ab"))
    assert machine.receive(m.ResponseTrailers()) == [
        Finish(FinishCause.COMPLETED, 200),
        m.SendResponseBody(b"B", False),
        m.SendResponseTrailers(),
    ]


def test_a_proxy_that_waits_gets_each_piece_changed_in_place() -> None:
    machine = responding(Shouting(), BodyMode.LOCKSTEP)
    assert machine.receive(m.ResponseBody(b"ab")) == [m.SendHeldResponseBody(b"A")]
    assert machine.receive(m.ResponseBody(b"")) == [m.SendResponseBodyUnchanged()]
    _, reply = machine.receive(m.ResponseBody(b"c", end_of_stream=True))
    assert reply == m.SendHeldResponseBody(b"BC", metadata=COST)


@pytest.mark.parametrize("end", [True, False])
def test_a_body_in_one_message_is_its_end_for_the_tap(end: bool) -> None:
    """Nothing can be sent after a body in one message, even when trailers follow."""
    tap = Shouting()
    machine = routed(tap, BodyMode.BUFFERED)
    machine.receive(m.ResponseHeaders(200, headers=LENGTH))
    actions = machine.receive(m.ResponseBody(b"hello", end_of_stream=end))
    assert actions[-1] == m.SendHeldResponseBody(b"HELLO", 5, COST)
    assert tap.seen[-1] == (b"hello", True)
    if not end:
        assert machine.receive(m.ResponseTrailers())[1:] == [m.SendResponseTrailers()]
    assert tap.seen[-1] == (b"hello", True)


def test_no_length_is_invented_for_a_body_in_one_message() -> None:
    """A length that the endpoint did not state might cost an HTTP/1 client its trailers."""
    machine = responding(Shouting(), BodyMode.BUFFERED)
    assert machine.receive(m.ResponseBody(b"hello"))[-1] == m.SendHeldResponseBody(
        b"HELLO", None, COST
    )


@pytest.mark.parametrize(
    ("mode", "removed"),
    [
        (BodyMode.DUPLEX, ("content-length",)),
        (BodyMode.LOCKSTEP, ("content-length",)),
        (BodyMode.PARTIAL, ("content-length",)),
        (BodyMode.BUFFERED, ()),
        (BodyMode.ABSENT, ()),
    ],
)
def test_the_length_goes_where_the_body_may_change_after_it(
    mode: BodyMode, removed: tuple[str, ...]
) -> None:
    event = m.ResponseHeaders(200, headers=LENGTH)
    (reply,) = routed(Shouting(), mode).receive(event)
    assert reply.remove_headers == removed
    assert reply.show_body is False  # full-duplex requests allow no change of modes
    for machine in (routed(None, mode), routed(Shouting(), mode, changes=False)):
        (reply,) = machine.receive(event)
        assert reply.remove_headers == ()
    without_body = m.ResponseHeaders(200, end_of_stream=True, headers=LENGTH)
    reply = routed(Shouting(), mode).receive(without_body)[-1]
    assert reply.remove_headers == ()


@pytest.mark.parametrize("tap", [None, Shouting()])
def test_headers_that_belong_to_the_system_do_not_reach_the_client(tap: Shouting | None) -> None:
    headers = {
        "x-llm-d-request-dropped-reason": "evicted",
        "x-gateway-destination-endpoint-served": "10.0.0.1:8000",
        "x-session-token": "theirs",
        "server": "vllm",
    }
    (reply,) = routed(tap).receive(m.ResponseHeaders(200, headers=headers))
    assert set(reply.remove_headers) == {
        "x-llm-d-request-dropped-reason",
        "x-gateway-destination-endpoint-served",
    }


def test_a_proxy_that_buffers_requests_is_asked_for_the_body_that_it_would_not_show() -> None:
    machine = routed(Shouting(), BodyMode.ABSENT, request_body=BodyMode.BUFFERED)
    (reply,) = machine.receive(m.ResponseHeaders(200, headers=LENGTH))
    assert reply.show_body
    assert reply.remove_headers == ("content-length",)
    _, piece = machine.receive(m.ResponseBody(b"hello", end_of_stream=True))
    assert piece == m.SendResponseBody(b"HELLO", True, COST)


def test_a_proxy_is_not_asked_for_a_body_that_is_not_there_or_only_watched() -> None:
    """Streamed bodies cost, so they are shown only where something has to be put back."""
    waiting = {"request_body": BodyMode.BUFFERED}
    machine = routed(Shouting(), BodyMode.ABSENT, **waiting)
    reply = machine.receive(m.ResponseHeaders(204, end_of_stream=True))[-1]
    assert not reply.show_body
    machine = routed(Shouting(), BodyMode.ABSENT, **waiting, changes=False)
    (reply,) = machine.receive(m.ResponseHeaders(200))
    assert not reply.show_body


@pytest.mark.parametrize(("shown", "cause"), [(0, "COMPLETED"), (1, "CLIENT_GONE")])
def test_a_proxy_that_disregards_the_wish_still_completes_its_responses(
    shown: int, cause: str
) -> None:
    machine = responding(Shouting(), BodyMode.ABSENT, request_body=BodyMode.BUFFERED)
    for _ in range(shown):
        machine.receive(m.ResponseBody(b"some"))
    (finish,) = machine.receive(m.Closed(Ending.END_OF_STREAM))
    assert finish == Finish(FinishCause[cause], 200)


def test_part_of_a_body_may_be_all_that_is_shown() -> None:
    """A proxy with a limited buffer closes the stream after the first part of a body."""
    machine = responding(Shouting(), BodyMode.PARTIAL)
    assert machine.receive(m.ResponseBody(b"part")) == [m.SendHeldResponseBody(b"PART", None, COST)]
    assert machine.receive(m.Closed(Ending.END_OF_STREAM)) == [Finish(FinishCause.COMPLETED, 200)]


def test_a_tap_that_fails_at_the_head_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tap = Shouting("head")
    machine = routed(tap)
    assert machine.receive(m.ResponseHeaders(200)) == [m.SendResponseHeaders(())]
    assert bytes_of(machine.receive(m.ResponseBody(b"abc", end_of_stream=True))) == b"abc"
    assert len(tap.seen) == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_tap_that_fails_at_a_piece_loses_no_byte(caplog: pytest.LogCaptureFixture) -> None:
    tap = Shouting()
    machine = responding(tap)
    assert bytes_of(machine.receive(m.ResponseBody(b"abc"))) == b"AB"
    tap.fails_at = "body"
    assert bytes_of(machine.receive(m.ResponseBody(b"def"))) == b"Cdef"
    assert bytes_of(machine.receive(m.ResponseBody(b"ghi", end_of_stream=True))) == b"ghi"
    assert tap.seen.count("end") == 1
    assert "ZeroDivisionError" in caplog.text


def test_a_tap_that_fails_at_the_end_does_not_break_the_stream() -> None:
    machine = responding(Shouting("end"))
    machine.receive(m.ResponseBody(b"ab"))
    assert machine.receive(m.ResponseTrailers())[-1] == m.SendResponseTrailers()


def test_a_mode_that_cannot_take_what_was_held_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Trailers after lockstep pieces leave no place for a last byte."""
    machine = responding(Shouting(), BodyMode.LOCKSTEP)
    machine.receive(m.ResponseBody(b"ab"))
    assert machine.receive(m.ResponseTrailers())[-1] == m.SendResponseTrailers()
    assert "lost 1 bytes" in caplog.text


def test_a_response_without_a_body_ends_the_tap() -> None:
    tap = Shouting()
    routed(tap).receive(m.ResponseHeaders(204, end_of_stream=True))
    assert tap.seen[-1] == "end"


def test_trailers_after_a_body_that_had_its_end_are_answered_once() -> None:
    machine = responding(None)
    machine.receive(m.ResponseBody(b"x", end_of_stream=True))
    assert machine.receive(m.ResponseTrailers()) == [m.SendResponseTrailers()]
    assert machine.receive(m.ResponseTrailers()) == []
