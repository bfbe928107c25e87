"""What is told of endpoints that fail and come back, to whoever watches."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from picker.outliers.health_record import EndpointState


class ProbeResult(Enum):
    """What a probe has found."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"  # it ended without a word about the endpoint


class RememberedHealth(msgspec.Struct, frozen=True):
    """How an endpoint has answered. `next_probe_seconds` is from now; None unless it is ejected."""

    state: EndpointState
    consecutive_failures: int
    ejections: int
    next_probe_seconds: float | None = None


class HealthWatcher(Protocol):
    """Told of what changes; must be quick and must not raise."""

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        """After so many failures in a row; the first probe is due after the wait."""
        ...

    def probed(self, key: str, result: ProbeResult) -> None:
        """A probe of an ejected endpoint has found something, or has ended without."""
        ...

    def returned(self, key: str) -> None:
        """It was ejected and is as good as any again."""
        ...

    def counted(self, num_ejected: int) -> None:
        """So many are ejected now."""
        ...


class NoWatcher:
    """Watches nothing."""

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        """Ignore."""

    def probed(self, key: str, result: ProbeResult) -> None:
        """Ignore."""

    def returned(self, key: str) -> None:
        """Ignore."""

    def counted(self, num_ejected: int) -> None:
        """Ignore."""
