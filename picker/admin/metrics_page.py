"""The metrics page: gauges that are remembered for a while, and several pools on one page.

There each pool's series have its name as a label more; series of the process, which no pool has,
stand there once and without it. That works on the text, which single pools' pages have anyway.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from picker.metrics.picker_metrics import Collector, Metric, PickerMetrics

LABEL: Final = "inference_pool"
_OWN: Final = f'{LABEL}="'
_HELP: Final = "\n# HELP "
# One label of a sample: in its value quotes and backslashes are escaped, all else is as it is.
_ONE_LABEL = re.compile(r'([a-zA-Z_:][\w:]*)="(?:[^"\\]|\\.)*"', re.ASCII)

# Of each family the lines of help and type, and the samples: a text of each pool.
_Families = dict[str, tuple[str, list[str]]]


async def merged(process: PickerMetrics, pools: Mapping[str, PickerMetrics]) -> bytes:
    """The exposition; `process` counts what no pool does, `pools` are by what they are called.

    Requests on this loop get their turn after each pool.
    """
    families: _Families = {}
    _add(families, process.render(process.of_process), "")
    for key, metrics in pools.items():
        await asyncio.sleep(0)
        _add(families, of_pool(metrics), f'{_OWN}{key}"')
    await asyncio.sleep(0)
    texts = [text for head, samples in families.values() for text in (head, *samples)]
    return "".join(f"{text}\n" for text in texts).encode()


def of_pool(metrics: PickerMetrics) -> bytes:
    """What one of several pools counts: all series but those of the process."""
    others = frozenset(map(id, metrics.of_process))
    return metrics.render(one for one in metrics.series if id(one) not in others)


def _add(families: _Families, page: bytes, label: str) -> None:
    """Put the samples of `page` to their families, each with `label`."""
    for name, head, samples in _blocks(page):
        _, known = families.setdefault(name, (head, []))
        if samples:
            known.append(_labelled(samples, label) if label else samples)


def _blocks(page: bytes) -> Iterator[tuple[str, str, str]]:
    """Name, head and samples of each: it begins with its help, and then tells its type.

    Clients choose names, and nothing but a line feed ends a line, which names never have: it is
    escaped in them.
    """
    for block in f"\n{page.decode()}".split(_HELP)[1:]:
        told, _, rest = block.partition("\n")
        kind, _, samples = rest.partition("\n")
        yield told.partition(" ")[0], f"{_HELP[1:]}{told}\n{kind}", samples.strip("\n")


def _labelled(samples: str, label: str) -> str:
    """Samples with `label`, but for those that have one of that name."""
    begin, alone = f"{{{label},", f"{{{label}}} "
    lines = samples.split("\n")
    if _OWN in samples:
        return "\n".join(
            line if LABEL in _ONE_LABEL.findall(line) else _with(line, begin, alone)
            for line in lines
        )
    return "\n".join([_with(line, begin, alone) for line in lines])


def _with(line: str, begin: str, alone: str) -> str:
    """A sample whose labels begin with `begin`; `alone` is before the value where it had none."""
    name, brace, rest = line.partition("{")
    return f"{name}{begin}{rest}" if brace else line.replace(" ", alone, 1)


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
        if self._said_at is None or now - self._said_at >= self._interval_seconds:
            self._said, self._said_at = tuple(self._inner.collect()), now
        yield from self._said
