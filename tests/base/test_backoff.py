"""Delays double, are bounded, differ between clients, and respect what a server asks for."""

from random import Random

from base.backoff import FIRST_SECONDS, MAX_ASKED_SECONDS, MAX_SECONDS, Backoff


def test_delays_double_up_to_the_longest() -> None:
    """Each delay is between half and all of its bound."""
    backoff = Backoff(Random(1))
    delays = [backoff.next_seconds() for _ in range(40)]
    for number, delay in enumerate(delays):
        whole = min(FIRST_SECONDS * 2**number, MAX_SECONDS)
        assert whole / 2 <= delay <= whole


def test_the_first_delay_after_a_reset_is_short() -> None:
    backoff = Backoff(Random(1))
    for _ in range(10):
        backoff.next_seconds()
    backoff.reset()
    assert backoff.next_seconds() <= FIRST_SECONDS


def test_two_clients_have_different_delays() -> None:
    first, second = Backoff(Random(1)), Backoff(Random(2))
    assert all(first.next_seconds() != second.next_seconds() for _ in range(10))


def test_a_delay_that_a_server_asks_for_is_exceeded_a_little() -> None:
    """A delay above the usual limit is respected, too, but not one of a day."""
    backoff = Backoff(Random(1))
    assert 30 <= backoff.next_seconds(asked_seconds=30) <= 37.5
    assert backoff.next_seconds(asked_seconds=86_400) <= MAX_ASKED_SECONDS * 1.25
    assert 0 < backoff.next_seconds(asked_seconds=-5) <= MAX_SECONDS


def test_the_least_delay_holds_from_the_first_failure() -> None:
    delays = [Backoff(Random(seed)).next_seconds(at_least_seconds=15) for seed in range(20)]
    assert all(12 <= delay <= 15 for delay in delays)
    assert len(set(delays)) > 1
