"""Service-level objectives: `ttft<1s,itl<50ms` bounds each request, `ttft_p95<1s` a whole run.

The `itl` of a request is the mean of its gaps (also called TPOT); that of a run is over all gaps.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

METRICS = ("ttft", "itl", "e2e")
QUANTILES = ("mean", "p50", "p95", "p99")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BOUND = re.compile(
    rf"({'|'.join(METRICS)})(?:_({'|'.join(QUANTILES)}))?(<=?)([0-9]+\.?[0-9]*)({'|'.join(_UNITS)})"
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound in seconds (exclusive or not, by `sign`); if `quantile` is None, on each request."""

    metric: str
    quantile: str | None
    sign: str
    seconds: float

    def holds(self, seconds: float | None) -> bool:
        """Check if a time is within the bound; a time that was not measured counts as within it."""
        if seconds is None:
            return True
        compare = operator.lt if self.sign == "<" else operator.le
        return bool(compare(seconds, self.seconds))

    def __str__(self) -> str:
        name = self.metric if self.quantile is None else f"{self.metric}_{self.quantile}"
        return f"{name}{self.sign}{self.seconds * 1e3:g}ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that must all hold; those on single requests, for at least `share` of the requests."""

    bounds: tuple[Bound, ...]
    share: float = 0.99

    @property
    def of_requests(self) -> str:
        return ",".join(str(bound) for bound in self.bounds if bound.quantile is None)

    def admits(self, measured: Mapping[str, float | None]) -> bool:
        return all(b.holds(measured[b.metric]) for b in self.bounds if b.quantile is None)


def read_bounds(text: str) -> tuple[Bound, ...]:
    """Read bounds. Raises `ValueError` with a message that says what is accepted instead."""
    bounds = []
    for part in text.replace(" ", "").split(","):
        found = _BOUND.fullmatch(part)
        if found is None or not float(found[4]):
            raise ValueError(
                f"takes bounds such as ttft<1s,itl<50ms or e2e_p95<2s "
                f"({', '.join(METRICS)}; {', '.join(QUANTILES)}; us, ms, s), not {part!r}"
            )
        bounds.append(Bound(found[1], found[2], found[3], float(found[4]) * _UNITS[found[5]]))
    return tuple(bounds)
