"""Counters, gauges and histograms that cost next to nothing to update, and their exposition.

Counting is a dictionary look-up and an addition, without locks: one thread counts and renders. The
deprecated twins of a series are computed when the page is rendered; if label sets coincide there,
their numbers are added up. The text is written directly, because the page is rendered in the thread
that serves requests and `prometheus_client` takes several times as long; a registry of that library
can collect the same numbers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Self, TypeAlias, TypeVar

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels: TypeAlias = tuple[str, ...]

_GO_TEXT: Callable[[float], str] = floatToGoString
_NO_RENAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Twin:
    """A deprecated name of a series, with some of its labels, which `renamed` maps."""

    name: str
    labels: Labels = ()
    renamed: Mapping[str, str] = field(default_factory=lambda: _NO_RENAMES)


@dataclass(frozen=True, slots=True)
class Declaration:
    name: str
    text: str
    labels: Labels = ()
    twins: tuple[Twin, ...] = ()


N = TypeVar("N")


class _Series(Generic[N]):
    """A series that has label sets (and then no number of its own), or one of its label sets. `N`
    is the type of its number: a float, or the counts and the sum of a histogram.
    """

    __slots__ = ("_children", "declaration")
    kind: ClassVar[str]

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self._children: dict[Labels, Self] = {}

    # On the path of every request: one look-up of a tuple, nothing built.
    def labels(self, *values: str) -> Self:
        child = self._children.get(values)
        return self._add(values) if child is None else child

    def remove(self, *values: str) -> None:
        self._children.pop(values, None)

    def numbers(self) -> Iterable[tuple[Labels, N]]:
        if not self.declaration.labels:
            return (((), self._number()),)
        return [(values, child._number()) for values, child in self._children.items()]

    def samples(self, number: N) -> Iterator[tuple[str, str, float]]:
        """Yield the suffix of the name, `le` label ("" for none), and value of each sample."""
        raise NotImplementedError

    def added(self, one: N, other: N) -> N:
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


class _Number(_Series[float]):
    __slots__ = ("_value",)

    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self._value: float = 0

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def samples(self, number: float) -> Iterator[tuple[str, str, float]]:
        yield "", "", number

    def added(self, one: float, other: float) -> float:
        return one + other

    def _number(self) -> float:
        return self._value


class Counter(_Number):
    __slots__ = ()
    kind = "counter"


class Gauge(_Number):
    __slots__ = ("_function",)
    kind = "gauge"

    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self._function: Callable[[], float] | None = None

    def dec(self, amount: float = 1) -> None:
        self._value -= amount

    def set(self, value: float) -> None:
        self._value = float(value)

    def set_function(self, function: Callable[[], float]) -> None:
        """Take the value from `function` whenever the page is rendered."""
        self._function = function

    def _number(self) -> float:
        return self._value if self._function is None else float(self._function())


Rows: TypeAlias = Callable[[], Iterable[tuple[Labels, float]]]


class Computed(_Number):
    """A series computed when it is read: storing all endpoints' numbers would hold up requests."""

    __slots__ = ("_rows",)
    kind = "gauge"

    def __init__(self, declaration: Declaration, rows: Rows) -> None:
        """`rows` must return the same values until the page is complete."""
        super().__init__(declaration)
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[Labels, float]]:
        return iter(self._rows())

    def numbers(self) -> Iterable[tuple[Labels, float]]:
        return self


Tally: TypeAlias = tuple[tuple[int, ...], float]


class Histogram(_Series[Tally]):
    __slots__ = ("_bounds", "_counts", "_les", "_sum")
    kind = "histogram"

    def __init__(self, declaration: Declaration, bounds: Iterable[float]) -> None:
        super().__init__(declaration)
        self._bounds = tuple(map(float, bounds))
        # As the library writes bounds, because sums over programs join on this text.
        self._les: tuple[str, ...] = (*map(_GO_TEXT, self._bounds), "+Inf")
        # Not cumulative, so that counting touches one number; `samples` adds them up.
        self._counts = [0] * len(self._les)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        # `le` is inclusive: a value that equals a bound counts as within it.
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_many(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def samples(self, number: Tally) -> Iterator[tuple[str, str, float]]:
        counts, total = number
        below = 0
        for le, below in zip(self._les, accumulate(counts), strict=True):
            yield "_bucket", le, below
        yield "_count", "", below
        yield "_sum", "", total

    def added(self, one: Tally, other: Tally) -> Tally:
        counts = tuple(a + b for a, b in zip(one[0], other[0], strict=True))
        return counts, one[1] + other[1]

    def _number(self) -> Tally:
        return tuple(self._counts), self._sum

    def _child(self) -> Self:
        return type(self)(self.declaration, self._bounds)


class Summary(_Series[tuple[int, float]]):
    __slots__ = ("_count", "_sum")
    kind = "summary"

    def __init__(self, declaration: Declaration) -> None:
        super().__init__(declaration)
        self._count = 0
        self._sum: float = 0

    def observe(self, value: float) -> None:
        self._count += 1
        self._sum += value

    def samples(self, number: tuple[int, float]) -> Iterator[tuple[str, str, float]]:
        yield "_count", "", number[0]
        yield "_sum", "", number[1]

    def added(self, one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
        return one[0] + other[0], one[1] + other[1]

    def _number(self) -> tuple[int, float]:
        return self._count, self._sum


def observe_each(values: Iterable[tuple[Histogram | None, float]]) -> None:
    """Count each value in its histogram. A call for each would cost more than the counting."""
    for histogram, value in values:
        if histogram is not None:
            histogram._counts[bisect_left(histogram._bounds, value)] += 1
            histogram._sum += value


AnySeries: TypeAlias = "Counter | Gauge | Histogram | Summary"


def metrics_of(series: _Series[Any]) -> Iterator[Metric]:
    """Yield the series and its twins as metrics of `prometheus_client`."""
    for name, text, labels, numbers in _tables(series):
        metric = Metric(_family(series, name), text, series.kind)
        for values, number in numbers:
            own = dict(zip(labels, values, strict=True))
            for suffix, le, value in series.samples(number):
                metric.add_sample(name + suffix, {**own, "le": le} if le else own, value)
        yield metric


def text_of(series: _Series[Any]) -> Iterator[str]:
    """Yield the series and its twins in Prometheus text format, line by line."""
    for name, text, labels, numbers in _tables(series):
        yield head_text(name, series.kind, text)
        for values, number in numbers:
            own = label_text(zip(labels, values, strict=True))
            braced, begun = (f"{{{own}}}", f"{{{own},") if own else ("", "{")
            for suffix, le, value in series.samples(number):
                where = f'{begun}le="{le}"}}' if le else braced
                yield f"{name}{suffix}{where} {_text(value)}\n"


class Page:
    """Renders series that have no twins and whose counts are whole numbers. Owns the text of each
    label set and rewrites it only when its number has changed: a picker reads the page 20 times a
    second.
    """

    def __init__(self, series: Iterable[AnySeries]) -> None:
        self._parts: list[tuple[_Series[Any], str, dict[Labels, _Written]]] = [
            (one, head_text(one.declaration.name, one.kind, one.declaration.text), {})
            for one in series
        ]

    def render(self) -> str:
        texts: list[str] = []
        for series, head, written in self._parts:
            texts.append(head)
            for values, number in series.numbers():
                known = written.get(values)
                if known is None:
                    known = written[values] = _Written(series, values)
                texts.append(known.text(series, number))
        return "".join(texts)


class _Written:
    __slots__ = ("_number", "_template", "_text")

    def __init__(self, series: _Series[Any], values: Labels) -> None:
        declared, lines = series.declaration, []
        own = label_text(zip(declared.labels, values, strict=True)).replace("%", "%%")
        for suffix, le, _ in series.samples(dict(series.numbers())[values]):
            inner = ",".join(one for one in (own, f'le="{le}"' if le else "") if one)
            braced = f"{{{inner}}}" if inner else ""
            lines.append(f"{declared.name}{suffix}{braced} %r\n")
        self._template = "".join(lines)
        self._number: Any = None
        self._text = ""

    def text(self, series: _Series[N], number: N) -> str:
        if number != self._number:
            self._number = number
            self._text = self._template % tuple([value for *_, value in series.samples(number)])
        return self._text


def head_text(name: str, kind: str, text: str) -> str:
    # Some scrapers read 0 where no type precedes the sample.
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def label_text(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])


def _tables(series: _Series[N]) -> Iterator[tuple[str, str, Labels, Iterable[tuple[Labels, N]]]]:
    declared = series.declaration
    numbers = series.numbers()
    yield declared.name, declared.text, declared.labels, numbers
    for twin in declared.twins:
        names = tuple(twin.renamed.get(label, label) for label in twin.labels)
        text = f"Deprecated: use {declared.name}."
        if twin.labels == declared.labels:  # nothing coincides, and rows stay computed on the way
            yield twin.name, text, names, numbers
            continue
        places = [declared.labels.index(label) for label in twin.labels]
        merged: dict[Labels, N] = {}
        for values, number in numbers:
            label_values = tuple(values[place] for place in places)
            known = merged.get(label_values)
            merged[label_values] = number if known is None else series.added(known, number)
        yield twin.name, text, names, merged.items()


def _family(series: _Series[Any], name: str) -> str:
    """Return the name of the family in `prometheus_client`, which itself adds `_total`."""
    return name.removesuffix("_total") if series.kind == "counter" else name


def _text(value: float) -> str:
    return repr(float(value)) if isfinite(value) else _GO_TEXT(value)


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:  # rare, and three copies of a string
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return value
