"""The metrics of several pools on one page: each pool's series have its name as a label more.

Series of the process, which no pool has, are told once and without it. Works on the text, which the
pages of single pools have anyway.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Final

from picker.metrics import PickerMetrics

LABEL: Final = "inference_pool"
_OWN: Final = f'{LABEL}="'
_HEADS: Final = ("# HELP ", "# TYPE ")
# One label of a sample: in its value quotes and backslashes are escaped, all else is as it is.
_ONE_LABEL = re.compile(r'([a-zA-Z_:][\w:]*)="(?:[^"\\]|\\.)*"', re.ASCII)

# Of each family the lines of help and type, by which of both they are, and the samples.
_Families = dict[str, tuple[dict[str, str], list[str]]]


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
    lines = [line for head, samples in families.values() for line in (*head.values(), *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def of_pool(metrics: PickerMetrics) -> bytes:
    """What one of several pools counts: all series but those of the process."""
    others = frozenset(map(id, metrics.of_process))
    return metrics.render(one for one in metrics.series if id(one) not in others)


def _add(families: _Families, page: bytes, label: str) -> None:
    """Put the lines of `page` to their families, with `label` at each sample."""
    for name, line in _lines(page):
        head, samples = families.setdefault(name, ({}, []))
        if line.startswith("#"):
            head.setdefault(line[: len(_HEADS[0])], line)
        else:
            samples.append(_labelled(line, label))


def _lines(page: bytes) -> Iterator[tuple[str, str]]:
    """Each line, and its family: the last one that a line of help or type has named."""
    family = ""
    # Clients choose names, and only this ends a line: `splitlines` knows a dozen other ways.
    for line in page.decode().split("\n"):
        if line.startswith(_HEADS):
            family = line[len(_HEADS[0]) :].partition(" ")[0]
        if line:
            yield family, line


def _labelled(line: str, label: str) -> str:
    """A sample with `label`, unless it has one of that name."""
    if not label or (_OWN in line and LABEL in _ONE_LABEL.findall(line)):
        return line
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{label},{rest}" if rest[0] != "}" else f"{name}{{{label}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
