"""Families of the metrics page: each owns its counts and the text last rendered from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


def escape(value: str) -> str:
    """A label value as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def label_text(labels: Mapping[str, str]) -> str:
    """`a="1",b="2"`."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in labels.items())


def head_text(name: str, kind: str, documentation: str) -> str:
    """The two comment lines of a family."""
    return f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"


class Histogram:
    """One histogram. Owns its counts and the text last rendered from them."""

    def __init__(
        self, name: str, documentation: str, buckets: tuple[float, ...], labels: str
    ) -> None:
        """`labels` is label text, possibly empty."""
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        safe = labels.replace("%", "%%")
        before_bound = f"{safe}," if safe else ""
        braces = f"{{{safe}}}" if safe else ""
        bounds = [*(repr(float(b)) for b in buckets), "+Inf"]
        lines = [f'{name}_bucket{{{before_bound}le="{bound}"}} %d\n' for bound in bounds]
        self._template = "".join(lines) + f"{name}_count{braces} %d\n{name}_sum{braces} %r\n"
        self._head = head_text(name, "histogram", documentation).encode()
        self._samples: bytes | None = None
        self._family = b""

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, or several that are the same."""
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times
        self._samples = None

    def render(self) -> bytes:
        """The family's text, with its head."""
        if self._samples is None:
            self._family = self._head + self.render_samples()
        return self._family

    def render_samples(self) -> bytes:
        """The samples alone, for a family that has several label sets."""
        if self._samples is None:
            total = 0
            values: list[float] = []
            for count in self._counts:
                total += count
                values.append(total)
            values += [total, self._sum]
            self._samples = (self._template % tuple(values)).encode()
        return self._samples


class LabelledCounter:
    """A counter with one extra label. Every label value is known beforehand, so that the series
    exist from the start and cannot grow without bound.
    """

    def __init__(
        self, name: str, documentation: str, labels: str, label: str, values: tuple[str, ...]
    ) -> None:
        self._counts = dict.fromkeys(values, 0)
        self._head = head_text(name, "counter", documentation)
        self._prefixes = {v: f'{name}{{{labels},{label}="{v}"}} ' for v in values}
        self._rendered: bytes | None = None

    def add(self, value: str) -> None:
        """Count one; `value` is one of those declared."""
        self._counts[value] += 1
        self._rendered = None

    def render(self) -> bytes:
        if self._rendered is None:
            lines = [f"{self._prefixes[v]}{count}\n" for v, count in self._counts.items()]
            self._rendered = (self._head + "".join(lines)).encode()
        return self._rendered
