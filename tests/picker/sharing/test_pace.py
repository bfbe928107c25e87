"""What is shared takes a bounded share of the time."""

from __future__ import annotations

from picker.sharing.pace import Pace


def test_what_takes_long_is_done_less_often() -> None:
    """At once the first time, then so that it takes a twentieth of the time."""
    pace = Pace(0.05)
    assert pace.is_due(100.0)
    pace.spent(100.0, 100.002)
    assert not pace.is_due(100.039)
    assert pace.is_due(100.041)
    pace.spent(100.041, 100.041)
    assert pace.is_due(100.041)
