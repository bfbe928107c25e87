"""Delays: short at first, doubling, bounded, never in step, and as long as a server asks."""

from __future__ import annotations

from random import Random

from base.backoff import FIRST_SECONDS, MAX_ASKED_SECONDS, MAX_SECONDS, Backoff


def test_delays_double_up_to_the_longest() -> None:
    """Each lies between a half and the whole of what its number in the row allows."""
    backoff = Backoff(Random(1))
    delays = [backoff.next_seconds() for _ in range(40)]
    for number, delay in enumerate(delays):
        whole = min(FIRST_SECONDS * 2**number, MAX_SECONDS)
        assert whole / 2 <= delay <= whole


def test_a_reset_makes_the_next_one_short() -> None:
    backoff = Backoff(Random(1))
    for _ in range(10):
        backoff.next_seconds()
    backoff.reset()
    assert backoff.next_seconds() <= FIRST_SECONDS


def test_two_clients_do_not_wait_in_step() -> None:
    """Seeds that differ give delays that differ."""
    first, second = Backoff(Random(1)), Backoff(Random(2))
    assert all(first.next_seconds() != second.next_seconds() for _ in range(10))


def test_what_a_server_asks_is_waited_and_a_little_more() -> None:
    """Also when it is longer than any delay of ours, but not for a day."""
    backoff = Backoff(Random(1))
    assert 30 <= backoff.next_seconds(asked_seconds=30) <= 37.5
    assert backoff.next_seconds(asked_seconds=86_400) <= MAX_ASKED_SECONDS * 1.25
    assert 0 < backoff.next_seconds(asked_seconds=-5) <= MAX_SECONDS


def test_the_least_delay_holds_from_the_first_failure() -> None:
    """With the spread that all delays have."""
    delays = [Backoff(Random(seed)).next_seconds(at_least_seconds=15) for seed in range(20)]
    assert all(12 <= delay <= 15 for delay in delays)
    assert len(set(delays)) > 1
