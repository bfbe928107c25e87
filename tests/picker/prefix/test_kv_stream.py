"""Message numbers reveal losses, repeats and restarts."""

import pytest

from picker.prefix.kv_stream import REPEAT_SECONDS, Continuity, EventStream


@pytest.fixture
def stream() -> EventStream:
    return EventStream()


def test_consecutive_numbers_are_applied(stream: EventStream) -> None:
    for number in range(3):
        assert stream.receive(number, 0.0) is Continuity.APPLY
        stream.mark_applied(number)
    assert stream.wanted == 3


def test_a_first_number_above_0_is_a_gap(stream: EventStream) -> None:
    assert stream.receive(5, 0.0) is Continuity.GAP
    assert stream.wanted == 0


def test_a_stream_continues_after_a_gap_filled_or_not(stream: EventStream) -> None:
    stream.receive(0, 0.0)
    stream.mark_applied(0)
    assert stream.receive(3, 0.0) is Continuity.GAP
    assert stream.wanted == 1
    stream.mark_applied(3)
    assert stream.receive(4, 0.0) is Continuity.APPLY


def test_a_number_that_is_not_higher_is_a_restart(stream: EventStream) -> None:
    for number in (0, 1):
        stream.receive(number, 0.0)
        stream.mark_applied(number)
    assert stream.receive(1, 0.0) is Continuity.RESTARTED
    assert stream.receive(1, 0.0) is Continuity.GAP
    stream.mark_applied(1)
    assert stream.receive(0, 0.0) is Continuity.RESTARTED
    assert stream.receive(0, 0.0) is Continuity.APPLY


def test_replayed_messages_may_repeat_for_a_limited_time(stream: EventStream) -> None:
    for number in range(4):
        stream.mark_applied(number)
    stream.end_replay(10.0)
    assert stream.receive(2, 11.0) is Continuity.IGNORE
    assert stream.receive(3, 11.0) is Continuity.IGNORE
    assert stream.receive(4, 11.0) is Continuity.APPLY

    late = EventStream(applied=3)
    late.end_replay(10.0)
    assert late.receive(0, 10.0 + REPEAT_SECONDS) is Continuity.RESTARTED
    assert late.receive(0, 10.0 + REPEAT_SECONDS) is Continuity.APPLY
