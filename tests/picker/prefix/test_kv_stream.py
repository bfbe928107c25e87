"""Numbers of messages tell losses, repetitions and new lives apart."""

from __future__ import annotations

from picker.prefix.kv_stream import TWICE_SECONDS, Continuity, EventStream


def test_consecutive_numbers_are_applied() -> None:
    stream = EventStream()
    for number in range(3):
        assert stream.heard(number, 0.0) is Continuity.APPLY
        stream.taken(number)
    assert stream.wanted == 3


def test_a_listener_that_joins_late_misses_everything_before() -> None:
    """The first number it hears is not 0."""
    stream = EventStream()
    assert stream.heard(5, 0.0) is Continuity.GAP
    assert stream.wanted == 0


def test_a_jump_is_a_gap_whether_or_not_it_is_filled() -> None:
    stream = EventStream()
    stream.heard(0, 0.0)
    stream.taken(0)
    assert stream.heard(3, 0.0) is Continuity.GAP
    assert stream.wanted == 1
    stream.taken(3)
    assert stream.heard(4, 0.0) is Continuity.APPLY


def test_a_number_that_is_not_higher_is_a_new_life() -> None:
    """The message is heard again, with nothing known."""
    stream = EventStream()
    for number in (0, 1):
        stream.heard(number, 0.0)
        stream.taken(number)
    assert stream.heard(1, 0.0) is Continuity.RESTARTED
    assert stream.heard(1, 0.0) is Continuity.GAP
    stream.taken(1)
    assert stream.heard(0, 0.0) is Continuity.RESTARTED
    assert stream.heard(0, 0.0) is Continuity.APPLY


def test_what_was_replayed_may_come_again_for_a_while() -> None:
    """Later the same numbers mean a new life."""
    stream = EventStream()
    for number in range(4):
        stream.taken(number)
    stream.replayed(10.0)
    assert stream.heard(2, 11.0) is Continuity.IGNORE
    assert stream.heard(3, 11.0) is Continuity.IGNORE
    assert stream.heard(4, 11.0) is Continuity.APPLY

    late = EventStream(applied=3)
    late.replayed(10.0)
    assert late.heard(0, 10.0 + TWICE_SECONDS) is Continuity.RESTARTED
    assert late.heard(0, 10.0 + TWICE_SECONDS) is Continuity.APPLY
