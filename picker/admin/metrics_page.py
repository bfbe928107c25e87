"""The metrics page: gauges that are remembered for a while, and several pools on one page.

There each pool's series have its name as a label more; series of the process, which no pool has,
stand there once and without it. That works on the lines, which single pools' pages have anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from picker.admin.answers import Turns
from picker.metrics.picker_metrics import (
    LINES,
    Collector,
    Metric,
    PickerMetrics,
    batched,
    encoded,
)
from picker.metrics.series import AnySeries

LABEL: Final = "inference_pool"
_OWN: Final = f'{LABEL}="'
_HELP: Final = "# HELP "
# One label of a sample: in its value quotes and backslashes are escaped, all else is as it is.
_ONE_LABEL = re.compile(r'([a-zA-Z_:][\w:]*)="(?:[^"\\]|\\.)*"', re.ASCII)

# Of each family the lines of help and type, and the samples.
_Families = dict[str, list[str]]


async def whole(metrics: PickerMetrics, series: Iterable[AnySeries] | None, turns: Turns) -> bytes:
    """The exposition of one pool; of declared series only these, where given."""
    return b"".join(await turns.collect(map(encoded, metrics.pieces(series))))


async def merged(process: PickerMetrics, pools: Mapping[str, PickerMetrics], turns: Turns) -> bytes:
    """The exposition; `process` counts what no pool does, `pools` are by what they are called."""
    families: _Families = {}

    def pieces() -> Iterator[bytes]:
        yield from _added(families, process.pieces(process.of_process), "")
        for key, metrics in pools.items():
            yield from _added(families, metrics.pieces(of_pool(metrics)), f'{_OWN}{key}"')
        lines = (line for family in families.values() for line in family)
        yield from map(encoded, batched(lines, LINES))

    return b"".join(await turns.collect(pieces()))


def of_pool(metrics: PickerMetrics) -> Iterable[AnySeries]:
    """The series of one of several pools: all but those of the process."""
    others = frozenset(map(id, metrics.of_process))
    return [one for one in metrics.series if id(one) not in others]


def _added(families: _Families, pieces: Iterable[list[str]], label: str) -> Iterator[bytes]:
    """Put lines to their families, each with `label`; yields nothing after each piece.

    Clients choose names, but no name has a line feed: it is escaped in them.
    """
    family: list[str] = []
    for lines in pieces:
        for line in lines:
            if line.startswith(_HELP):
                family = families.setdefault(line.split(" ", 3)[2], [])
                if not family:
                    family.append(line)
            else:
                family.append(_labelled(line, label) if label else line)
        yield b""


def _labelled(line: str, label: str) -> str:
    """A sample with `label`, but for one that has a label of that name."""
    if _OWN in line and LABEL in _ONE_LABEL.findall(line):
        return line
    name, brace, rest = line.partition("{")
    return f"{name}{{{label},{rest}" if brace else line.replace(" ", f"{{{label}}} ", 1)


class RememberedCollector(Collector):
    """The gauges of another collector, computed anew only every `interval_seconds`. `clock` is
    monotonic.
    """

    def __init__(
        self, inner: Collector, interval_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._said: tuple[Metric, ...] = ()
        self._said_at: float | None = None

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        now = self._clock()
        if self._said_at is not None and now - self._said_at < self._interval_seconds:
            yield from self._said
            return
        said = []
        for metric in self._inner.collect():  # one by one: others have their turn between them
            said.append(metric)
            yield metric
        self._said, self._said_at = tuple(said), now
