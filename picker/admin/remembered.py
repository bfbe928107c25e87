"""Gauges that are told again for a while before they are computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picker.metrics.picker_metrics import Collector, Metric


class RememberedCollector(Collector):
    """What another collector said, at most `interval_seconds` ago. `clock` never goes back."""

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
