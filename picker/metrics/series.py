"""Counters, gauges and histograms that cost next to nothing to count with, and their exposition.

Theory of operation: a request counts a dozen series, so counting is a dictionary look-up and an
addition, without locks (one thread counts and renders) and without the deprecated twins of a
series: those are computed from the series' own numbers when the page is rendered, under the names
and with the labels that they had, numbers of label sets that fall together added up.

The text is written directly, which takes a fraction of what `prometheus_client` takes: the page is
rendered in the thread that routes requests. The same numbers can be collected by a registry of that
library, which the tests compare the text with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

Labels: TypeAlias = tuple[str, ...]

_GO_TEXT: Callable[[float], str] = floatToGoString
_NO_RENAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Twin:
    """A deprecated name of a series.

    `labels` are those of the series that it has, in order; `renamed` says what it calls some of
    them.
    """

    name: str
    labels: Labels = ()
    renamed: Mapping[str, str] = field(default_factory=lambda: _NO_RENAMES)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a series is: its full name, its help text, the names of its labels, its twins."""

    name: str
    text: str
    labels: Labels = ()
    twins: tuple[Twin, ...] = ()


N = TypeVar("N")


class _Series(Generic[N]):
    """A series with its label sets (then it has no number of its own), or one of those.

    `N` is what it counts to: a number, or the counts and the sum of a histogram.
    """

    __slots__ = ("_children", "declaration")
    kind: ClassVar[str]

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self._children: dict[Labels, Self] = {}

    def labels(self, *values: str) -> Self:
        """The one with these label values, in the order of the declaration."""
        child = self._children.get(values)
        return self._add(values) if child is None else child

    def remove(self, *values: str) -> None:
        """Forget a label set; nothing happens when it is not there."""
        self._children.pop(values, None)

    def numbers(self) -> Iterable[tuple[Labels, N]]:
        """Label values and number of each label set."""
        if not self.declaration.labels:
            return (((), self._number()),)
        return [(values, child._number()) for values, child in self._children.items()]

    def samples(self, number: N) -> Iterator[tuple[str, str, float]]:
        """Suffix of the name, `le` label ("" where there is none), and value of each sample."""
        raise NotImplementedError

    def added(self, one: N, other: N) -> N:
        """Both numbers together."""
        raise NotImplementedError

    def _number(self) -> N:
        raise NotImplementedError

    def _child(self) -> Self:
        return type(self)(self.declaration)

    def _add(self, values: Labels) -> Self:
        declared = self.declaration
        if len(values) != len(declared.labels):
            raise ValueError(f"{declared.name} has the labels {declared.labels}, not {values}")
        child = self._children[values] = self._child()
        return child


class Counter(_Series[float]):
    """Only grows."""

    __slots__ = ("_value",)
    kind = "counter"

    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count `amount`, which is not negative."""
        self._value += amount

    def samples(self, number: float) -> Iterator[tuple[str, str, float]]:
        """One."""
        yield "", "", number

    def added(self, one: float, other: float) -> float:
        """The sum."""
        return one + other

    def _number(self) -> float:
        return self._value


class Gauge(_Series[float]):
    """Goes up and down."""

    __slots__ = ("_function", "_value")
    kind = "gauge"

    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self._value = 0.0
        self._function: Callable[[], float] | None = None

    def inc(self, amount: float = 1.0) -> None:
        """Go up."""
        self._value += amount

    def dec(self, amount: float = 1.0) -> None:
        """Go down."""
        self._value -= amount

    def set(self, value: float) -> None:
        """Be `value`."""
        self._value = float(value)

    def set_function(self, function: Callable[[], float]) -> None:
        """Take the value from `function` whenever the page is rendered."""
        self._function = function

    def samples(self, number: float) -> Iterator[tuple[str, str, float]]:
        """One."""
        yield "", "", number

    def added(self, one: float, other: float) -> float:
        """The sum."""
        return one + other

    def _number(self) -> float:
        return self._value if self._function is None else float(self._function())


Tally: TypeAlias = tuple[tuple[int, ...], float]


class Histogram(_Series[Tally]):
    """Counts values by the bucket that they fall into; bounds are inclusive."""

    __slots__ = ("_bounds", "_counts", "_les", "_sum")
    kind = "histogram"

    def __init__(self, declaration: Declaration, bounds: Iterable[float]) -> None:
        super().__init__(declaration)
        self._bounds = tuple(map(float, bounds))
        self._les: tuple[str, ...] = (*map(_GO_TEXT, self._bounds), "+Inf")
        self._counts = [0] * len(self._les)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value`, which is a number."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, number: Tally) -> Iterator[tuple[str, str, float]]:
        """The buckets, each with those below it, the count and the sum."""
        counts, total = number
        below = 0
        for le, below in zip(self._les, accumulate(counts), strict=True):
            yield "_bucket", le, below
        yield "_count", "", below
        yield "_sum", "", total

    def added(self, one: Tally, other: Tally) -> Tally:
        """Bucket by bucket."""
        counts = tuple(a + b for a, b in zip(one[0], other[0], strict=True))
        return counts, one[1] + other[1]

    def _number(self) -> Tally:
        return tuple(self._counts), self._sum

    def _child(self) -> Self:
        return type(self)(self.declaration, self._bounds)


def observe_each(values: Iterable[tuple[Histogram | None, float]]) -> None:
    """Count each value in its histogram, if it has one: a request has a dozen, and a call each
    would cost more than the counting.
    """
    for histogram, value in values:
        if histogram is not None:
            histogram._counts[bisect_left(histogram._bounds, value)] += 1
            histogram._sum += value


AnySeries: TypeAlias = "Counter | Gauge | Histogram"


def metrics_of(series: _Series[Any]) -> Iterator[Metric]:
    """The series and its twins, as a collector of `prometheus_client`."""
    for name, text, labels, numbers in _tables(series):
        metric = Metric(_family(series, name), text, series.kind)
        for values, number in numbers:
            own = dict(zip(labels, values, strict=True))
            for suffix, le, value in series.samples(number):
                metric.add_sample(name + suffix, {**own, "le": le} if le else own, value)
        yield metric


def text_of(series: _Series[Any]) -> Iterator[str]:
    """The series and its twins in Prometheus text format, line by line."""
    for name, text, labels, numbers in _tables(series):
        yield f"# HELP {name} {text}\n# TYPE {name} {series.kind}\n"
        for values, number in numbers:
            own = ",".join(
                f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)
            )
            braced, begun = (f"{{{own}}}", f"{{{own},") if own else ("", "{")
            for suffix, le, value in series.samples(number):
                where = f'{begun}le="{le}"}}' if le else braced
                yield f"{name}{suffix}{where} {_text(value)}\n"


def gauge_text(metric: Metric) -> Iterator[str]:
    """A gauge of `prometheus_client` in the same format, line by line."""
    yield f"# HELP {metric.name} {metric.documentation}\n# TYPE {metric.name} gauge\n"
    for sample in metric.samples:
        own = ",".join(
            f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())
        )
        yield f"{sample.name}{f'{{{own}}}' if own else ''} {_text(sample.value)}\n"


def _tables(
    series: _Series[N],
) -> Iterator[tuple[str, str, Labels, Iterable[tuple[Labels, N]]]]:
    """Name, help, label names and numbers of the series, then of each twin."""
    declared = series.declaration
    numbers = series.numbers()
    yield declared.name, declared.text, declared.labels, numbers
    for twin in declared.twins:
        places = [declared.labels.index(label) for label in twin.labels]
        merged: dict[Labels, N] = {}
        for values, number in numbers:
            label_values = tuple(values[place] for place in places)
            known = merged.get(label_values)
            merged[label_values] = number if known is None else series.added(known, number)
        names = tuple(twin.renamed.get(label, label) for label in twin.labels)
        yield twin.name, f"Deprecated: use {declared.name}.", names, merged.items()


def _family(series: _Series[Any], name: str) -> str:
    """How `prometheus_client` names the family; it keeps the `_total` of counters to itself."""
    return name.removesuffix("_total") if series.kind == "counter" else name


def _text(value: float) -> str:
    """`value` as the format writes it."""
    return repr(float(value)) if isfinite(value) else _GO_TEXT(value)


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return value
