"""The metrics page: cached gauges, and several pools on one page.

With several pools, each series of a pool has the pool's name as an additional label.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from base.series import AnySeries, Computed
from picker.admin.answers import Turns
from picker.metrics.picker_metrics import LINES, Collector, PickerMetrics, batched, encoded

LABEL: Final = "inference_pool"
_OWN: Final = f'{LABEL}="'
_HELP: Final = "# HELP "
# One label of a sample: its value escapes quotes and backslashes only.
_ONE_LABEL = re.compile(r'([a-zA-Z_:][\w:]*)="(?:[^"\\]|\\.)*"', re.ASCII)

# The lines of each family: help, type, samples.
_Families = dict[str, list[str]]


async def whole(metrics: PickerMetrics, series: Iterable[AnySeries] | None, turns: Turns) -> bytes:
    return b"".join(await turns.collect(map(encoded, metrics.pieces(series))))


async def merged(process: PickerMetrics, pools: Mapping[str, PickerMetrics], turns: Turns) -> bytes:
    """Return the exposition of several pools; `process` has the series without a pool."""
    families: _Families = {}

    def pieces() -> Iterator[bytes]:
        yield from _added(families, process.pieces(process.of_process), "")
        for key, metrics in pools.items():
            yield from _added(families, metrics.pieces(of_pool(metrics)), f'{_OWN}{key}"')
        lines = (line for family in families.values() for line in family)
        yield from map(encoded, batched(lines, LINES))

    return b"".join(await turns.collect(pieces()))


def of_pool(metrics: PickerMetrics) -> Iterable[AnySeries]:
    # By identity: a pool's series have the same names.
    others = frozenset(map(id, metrics.of_process))
    return [one for one in metrics.series if id(one) not in others]


def _added(families: _Families, pieces: Iterable[list[str]], label: str) -> Iterator[bytes]:
    """Add lines, each with `label`, to their families; yield an empty piece for each piece."""
    family: list[str] = []
    for lines in pieces:
        for line in lines:
            # No sample begins like this: line feeds in the names of clients are escaped.
            if line.startswith(_HELP):
                family = families.setdefault(line.split(" ", 3)[2], [])
                if not family:
                    family.append(line)
            else:
                family.append(_labelled(line, label) if label else line)
        yield b""


def _labelled(line: str, label: str) -> str:
    """Return a sample with `label` added, unless it already has a label of that name."""
    # The text alone may also be part of a name that a client chose.
    if _OWN in line and LABEL in _ONE_LABEL.findall(line):
        return line
    name, brace, rest = line.partition("{")
    return f"{name}{{{label},{rest}" if brace else line.replace(" ", f"{{{label}}} ", 1)


class RememberedCollector:
    """Caches the gauges of another collector for `interval_seconds`."""

    def __init__(
        self, inner: Collector, interval_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._cached: tuple[Computed, ...] = ()
        self._cached_at: float | None = None

    def collect(self) -> Iterator[Computed]:
        now = self._clock()
        if self._cached_at is not None and now - self._cached_at < self._interval_seconds:
            yield from self._cached
            return
        metrics = []
        for metric in self._inner.collect():  # one by one, for `Turns`
            metrics.append(metric)
            yield metric
        self._cached, self._cached_at = tuple(metrics), now
