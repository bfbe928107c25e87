"""What the HTTP port asks the rest of the picker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from picker.admin.traffic import Recent
from picker.decisions.record_views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView


class HealthView(msgspec.Struct, frozen=True):
    """How an endpoint has answered lately: `state` is healthy, suspect, ejected or on-trial."""

    state: str
    consecutive_failures: int = 0
    ejections: int = 0
    next_probe_seconds: float | None = None


class ConfigView(msgspec.Struct, frozen=True):
    """The configuration in use: whence it came, as it was written, with its defaults, and since
    when.
    """

    source: str
    written: str
    effective: str
    loaded_unix_seconds: float
    warnings: tuple[str, ...] = ()
    last_error: str | None = None


class AdminSource(Protocol):
    """What is behind the routes of one pool."""

    async def queues(self) -> QueuesView:
        """Flow control now."""
        ...

    async def decisions(self, limit: int) -> Sequence[RecordSummary]:
        """The last requests, the newest first."""
        ...

    async def decision(self, request_id: str | None) -> RecordView | None:
        """One request, the last one for None; None when it is not known any more."""
        ...

    async def health(self) -> Mapping[str, HealthView]:
        """How endpoints have answered, by key; one that is absent has done nothing wrong."""
        ...

    async def traffic(self) -> Mapping[str, Recent]:
        """What was sent where lately, by key; to be asked once a second. Nothing is said of an
        endpoint that nobody knows about.
        """
        ...

    def configuration(self) -> ConfigView:
        """What is in use."""
        ...

    def pool_problem(self) -> str | None:
        """Why what is known of the pool may be old, in a sentence; None: it is current."""
        ...
