"""The drain rate of a queue is a decaying average."""

import pytest

from picker.flowcontrol.outcomes import UNKNOWN_RETRY_SECONDS, DrainRate


@pytest.mark.parametrize("seconds", [2, 20, 200])
@pytest.mark.parametrize("rate", [0.5, 10, 200])
def test_a_steady_stream_has_its_rate_from_the_beginning(rate: float, seconds: int) -> None:
    """The short history at the start causes no bias."""
    drained = DrainRate()
    for step in range(int(rate * seconds)):
        drained.count(100 + step / rate)
    assert drained.per_second(100 + seconds) == pytest.approx(rate, rel=0.15, abs=0.3)


def test_a_rate_decays_without_events() -> None:
    drained = DrainRate()
    for step in range(1000):
        drained.count(step / 10)
    assert drained.per_second(100 + 6.93) == pytest.approx(5, rel=0.05)
    assert drained.retry_after_seconds(1000, 300) == UNKNOWN_RETRY_SECONDS


def test_a_retry_after_is_whole_seconds_within_a_minute() -> None:
    drained = DrainRate()
    assert drained.retry_after_seconds(10**9, 0.0) == UNKNOWN_RETRY_SECONDS
    for step in range(1000):
        drained.count(step / 10)
    found = [drained.retry_after_seconds(ahead, 100.0) for ahead in (0, 1, 95, 105, 10**9)]
    assert found == [1, 1, 10, 11, 60]
