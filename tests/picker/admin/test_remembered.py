"""Gauges are told again for a while before they are computed anew."""

from __future__ import annotations

from collections.abc import Iterator

from picker.admin.remembered import RememberedCollector
from picker.metrics.picker_metrics import Collector, Metric, gauge_family


class Counting(Collector):
    """Says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def collect(self) -> Iterator[Metric]:
        self.asked += 1
        yield gauge_family("x", "", ("name",))


def test_within_the_interval_nothing_is_computed() -> None:
    """And at its end it is."""
    now = [10.0]
    inner = Counting()
    collector = RememberedCollector(inner, 5.0, lambda: now[0])
    for moment, asked in ((10.0, 1), (14.9, 1), (15.0, 2), (16.0, 2), (30.0, 3)):
        now[0] = moment
        assert len(list(collector.collect())) == 1
        assert inner.asked == asked


def test_without_an_interval_everything_is_computed_each_time() -> None:
    """The default."""
    inner = Counting()
    collector = RememberedCollector(inner, 0.0, lambda: 1.0)
    list(collector.collect())
    list(collector.collect())
    assert inner.asked == 2
