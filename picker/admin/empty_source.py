"""A source that knows nothing, for a server that nobody gave one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from picker.admin.sources import ConfigView, HealthView
from picker.admin.traffic import Recent
from picker.decisions.record_views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView


class EmptySource:
    """An `AdminSource`: no flow control, no decisions, nothing known of endpoints' answers."""

    async def queues(self) -> QueuesView:
        """Flow control is off."""
        return QueuesView()

    async def decisions(self, limit: int) -> Sequence[RecordSummary]:
        """None."""
        return ()

    async def decision(self, request_id: str | None) -> RecordView | None:
        """None."""
        return None

    async def health(self) -> Mapping[str, HealthView]:
        """Nothing is known."""
        return {}

    async def traffic(self) -> Mapping[str, Recent]:
        """Nothing is known."""
        return {}

    def configuration(self) -> ConfigView:
        """Nothing is known."""
        return ConfigView(source="", written="", effective="", loaded_unix_seconds=0.0)

    def pool_problem(self) -> str | None:
        """Nothing is wrong."""
        return None
