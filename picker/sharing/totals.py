"""The numbers of all series of several processes, added up.

Counters and histograms of a process that has ended stay part of the sum, so that it never falls.
What a gauge says is true of a living process only. Which gauges exist once, whatever the number of
processes, is a matter of who sets them: one process, and the others' are 0 or without label sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from picker.metrics import PickerMetrics
from picker.series import Gauge, Tally

# By name of the series: label values and number of each label set.
Numbers: TypeAlias = dict[str, list[tuple[tuple[str, ...], float | Tally]]]


def numbers_of(metrics: PickerMetrics) -> Numbers:
    """What a process has counted."""
    return {one.declaration.name: list(one.numbers()) for one in metrics.series}


class Totals:
    """Adds up. Owns what processes that have ended had counted."""

    def __init__(self) -> None:
        self._ended = PickerMetrics()

    def add_ended(self, numbers: Numbers) -> None:
        """A process that had counted `numbers` is no more."""
        _absorb(self._ended, numbers, with_gauges=False)

    def render(self, own: PickerMetrics, others: Iterable[Numbers]) -> bytes:
        """The exposition of everybody's numbers, with the pool's gauges of `own`."""
        total = PickerMetrics()
        for numbers in (numbers_of(own), numbers_of(self._ended), *others):
            _absorb(total, numbers, with_gauges=True)
        return own.render(total.series)


def _absorb(total: PickerMetrics, numbers: Numbers, *, with_gauges: bool) -> None:
    known: Mapping[str, Any] = {one.declaration.name: one for one in total.series}
    for name, counted in numbers.items():
        series = known.get(name)
        if series is None or (isinstance(series, Gauge) and not with_gauges):
            continue
        for labels, number in counted:
            series.absorb(labels, number)
