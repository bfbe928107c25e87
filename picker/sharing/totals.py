"""The numbers of all series of several processes, added up.

Counters and histograms of a process that has ended stay part of the sum, so that it never falls.
What a gauge says is true of a living process only; of those that are no counts (`NOT_ADDED`) the
greatest is told. Which gauges exist once, whatever the number of
processes, is a matter of who sets them: one process, and the others' are 0 or without label sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from picker.metrics.declarations import OWN_PREFIX, PREFIX
from picker.metrics.picker_metrics import Collector, Metric, PickerMetrics
from picker.metrics.series import Gauge, Tally

# Each process tells the same thing of its own requests; there is nothing to be added up.
NOT_ADDED = frozenset(
    {
        PREFIX + "disaggregatedset_revision_gating_share",
        PREFIX + "inference_request_metric",
        OWN_PREFIX + "endpoints_ejected",
    }
)
# By name of the series: label values and number of each label set.
Counted: TypeAlias = dict[str, list[tuple[tuple[str, ...], float | Tally]]]


class Computed(msgspec.Struct, array_like=True):
    """A gauge that is computed when it is asked for: samples are name, labels and value."""

    name: str
    text: str
    samples: list[tuple[str, dict[str, str], float]]


class Numbers(msgspec.Struct, array_like=True):
    """What a process knows of all its series at one moment."""

    counted: Counted
    computed: list[Computed]


def numbers_of(metrics: PickerMetrics) -> Numbers:
    """What a process knows now."""
    counted: Counted = {one.declaration.name: list(one.numbers()) for one in metrics.series}
    computed = [
        Computed(
            one.name,
            one.documentation,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in one.samples],
        )
        for one in metrics.computed()
    ]
    return Numbers(counted, computed)


class Totals:
    """Adds up. Owns what processes that have ended had counted."""

    def __init__(self) -> None:
        self._ended = PickerMetrics()

    def add_ended(self, numbers: Numbers) -> None:
        """A process that knew `numbers` is no more."""
        _absorb(self._ended, numbers, with_gauges=False)

    def render(self, own: PickerMetrics, others: Iterable[Numbers]) -> bytes:
        """The exposition of everybody's numbers, with the computed gauges of `own` as they are."""
        total, living = PickerMetrics(), tuple(others)
        _absorb(total, numbers_of(own), with_gauges=True)
        _absorb(total, numbers_of(self._ended), with_gauges=False)
        for numbers in living:
            _absorb(total, numbers, with_gauges=True)
        registry = CollectorRegistry()
        registry.register(_Sums([one for numbers in living for one in numbers.computed]))
        return own.render(total.series) + generate_latest(registry)


class _Sums(Collector):
    """The computed gauges of several processes by labels: their sums, or the greatest of each."""

    def __init__(self, computed: Iterable[Computed]) -> None:
        self._computed = tuple(computed)

    def collect(self) -> Iterator[Metric]:
        """Each gauge once."""
        texts: dict[str, str] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for one in self._computed:
            texts.setdefault(one.name, one.text)
            values = sums.setdefault(one.name, {})
            for name, labels, value in one.samples:
                which = (name, tuple(labels.items()))
                known = values.get(which, 0.0)
                values[which] = max(known, value) if one.name in NOT_ADDED else known + value
        for family, values in sums.items():
            metric = Metric(family, texts[family], "gauge")
            for (name, pairs), value in values.items():
                metric.add_sample(name, dict(pairs), value)
            yield metric


def _absorb(total: PickerMetrics, numbers: Numbers, *, with_gauges: bool) -> None:
    known: Mapping[str, Any] = {one.declaration.name: one for one in total.series}
    for name, counted in numbers.counted.items():
        series = known.get(name)
        if series is None or (isinstance(series, Gauge) and not with_gauges):
            continue
        told = dict(series.numbers()) if name in NOT_ADDED else {}
        for labels, number in counted:
            if labels not in told:
                series.absorb(labels, number)
            elif number > told[labels]:
                (series.labels(*labels) if labels else series).set(number)
