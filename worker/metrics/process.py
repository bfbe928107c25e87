"""CPU, memory, file descriptors and garbage collection of this process."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

_REFRESH_SECONDS = 1.0


class ProcessNumbers:
    """What `prometheus_client` tells about a process by default, read at most once a second."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._read_at: float | None = None
        self._text = b""

    def render(self, now_seconds: float) -> bytes:
        """The text, without the start time, which the worker states itself on every platform."""
        if self._read_at is None or now_seconds - self._read_at >= _REFRESH_SECONDS:
            lines = generate_latest(self._registry).splitlines(keepends=True)
            self._text = b"".join(li for li in lines if b"process_start_time_seconds" not in li)
            self._read_at = now_seconds
        return self._text
