"""A process that ended is replaced at once, and later and later while that does not help."""

from __future__ import annotations

from picker.processes.restarts import LONGEST_DELAY_SECONDS, STABLE_SECONDS, RestartDelays


def test_delays_grow_while_lives_are_short() -> None:
    """Up to a limit."""
    delays = RestartDelays()
    found = [delays.next(1.0) for _ in range(40)]
    assert found[:4] == [0.0, 0.25, 0.5, 1.0]
    assert found == sorted(found)
    assert found[-1] == LONGEST_DELAY_SECONDS


def test_a_long_life_begins_anew() -> None:
    """What ended it had nothing to do with the restarts before."""
    delays = RestartDelays()
    for _ in range(5):
        delays.next(1.0)
    assert delays.next(STABLE_SECONDS) == 0.0
    assert delays.next(1.0) == 0.25
