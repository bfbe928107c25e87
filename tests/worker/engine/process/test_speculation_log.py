"""The log line of speculation says what happened since the last one."""

from worker.engine.process.speculation_log import SpeculationLog
from worker.types import SpeculationStats


def stats(num_drafts: int, drafted: int, *by_position: int) -> SpeculationStats:
    return SpeculationStats(num_drafts, drafted, sum(by_position), by_position)


def test_a_line_comes_every_ten_seconds_with_what_came_between() -> None:
    log = SpeculationLog()
    assert log.line(SpeculationStats(), 100.0) is None
    assert log.line(stats(5, 10, 4, 2), 109.9) is None
    assert log.line(stats(10, 20, 8, 4), 110.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.20, Accepted throughput: 1.20 tokens/s,"
        " Drafted throughput: 2.00 tokens/s, Accepted: 12 tokens, Drafted: 20 tokens,"
        " Per-position acceptance rate: 0.800, 0.400, Avg Draft acceptance rate: 60.0%"
    )
    assert log.line(stats(11, 22, 9, 5), 119.9) is None
    second = log.line(stats(12, 24, 9, 5), 130.0)
    assert "Accepted: 2 tokens, Drafted: 4 tokens" in second
    assert "Per-position acceptance rate: 0.500, 0.500" in second
    assert "Accepted throughput: 0.10 tokens/s" in second


def test_nothing_is_said_while_nothing_is_drafted() -> None:
    log = SpeculationLog()
    for second in range(100):
        assert log.line(SpeculationStats(), float(second)) is None
    log = SpeculationLog()
    log.line(stats(1, 4, 1, 1), 0.0)
    log.line(stats(2, 8, 2, 2), 10.0)
    assert log.line(stats(2, 8, 2, 2), 1000.0) is None
    assert log.line(stats(3, 12, 3, 3), 1005.0) is None
    line = log.line(stats(4, 16, 4, 4), 1010.0)
    assert "Accepted throughput: 0.40 tokens/s" in line


def test_an_idle_hour_slows_nothing_down() -> None:
    """Rates are over the time that the engine worked: 6 seconds, an hour of sleep, 4 more."""
    log = SpeculationLog()
    log.resume(100.0)
    assert log.line(stats(5, 20, 10, 5), 106.0) is None
    log.resume(3706.0)
    line = log.line(stats(10, 40, 20, 10), 3710.0)
    assert "Accepted throughput: 3.00 tokens/s, Drafted throughput: 4.00 tokens/s" in line
    log.resume(9000.0)
    assert log.line(stats(11, 44, 21, 11), 9009.9) is None
