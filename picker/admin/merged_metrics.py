"""The metrics of several pools on one page: each pool's series have its name as a label more.

Series of the process, which no pool has, are told once and without it. Works on the text, which the
pages of single pools have anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from picker.metrics import PickerMetrics

LABEL: Final = "inference_pool"
_HELP, _TYPE = "# HELP ", "# TYPE "


def merged(process: PickerMetrics, pools: Mapping[str, PickerMetrics]) -> bytes:
    """The exposition; `process` counts what no pool does, `pools` are by what they are called."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    _add(families, process.render(process.of_process), "")
    for key, metrics in pools.items():
        own = frozenset(map(id, metrics.of_process))
        page = metrics.render(one for one in metrics.series if id(one) not in own)
        _add(families, page, f'{LABEL}="{key}"')
    lines = [line for head, samples in families.values() for line in (*head, *samples)]
    return "".join(f"{line}\n" for line in lines).encode()


def _add(families: dict[str, tuple[list[str], list[str]]], page: bytes, label: str) -> None:
    """Put the lines of `page` to their families, with `label` at each sample."""
    for name, line in _lines(page):
        head, samples = families.setdefault(name, ([], []))
        if not line.startswith("#"):
            samples.append(_labelled(line, label))
        elif line not in head:
            head.append(line)


def _lines(page: bytes) -> Iterator[tuple[str, str]]:
    """Each line, and its family: the last one that a line of help or type has named."""
    family = ""
    for line in page.decode().splitlines():
        if line.startswith((_HELP, _TYPE)):
            family = line[len(_HELP) :].partition(" ")[0]
        yield family, line


def _labelled(line: str, label: str) -> str:
    """A sample with `label`, unless it has one of that name: quotes in values are escaped."""
    if not label or f'{LABEL}="' in line:
        return line
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}" if rest[0] != "}" else f"{name}{{{label}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
