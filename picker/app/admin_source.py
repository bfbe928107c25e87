"""What a process that decides requests answers to people's questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from picker.admin.sources import ConfigView, HealthView
from picker.admin.traffic import Recent
from picker.app.config_status import ConfigStatus
from picker.app.request_side import RequestSide
from picker.decisions.record_views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView


class ProcessAdmin:
    """An `AdminSource` of a picker that is one process; `pool_problem` asks where its pool comes
    from.
    """

    def __init__(
        self,
        requests: RequestSide,
        config: ConfigStatus,
        pool_problem: Callable[[], str | None],
    ) -> None:
        self._requests = requests
        self._config = config
        self._pool_problem = pool_problem

    async def queues(self) -> QueuesView:
        """Flow control now."""
        return self._requests.queues()

    async def decisions(self, limit: int) -> Sequence[RecordSummary]:
        """The last requests, the newest first."""
        return last_decisions(self._requests, limit)

    async def decision(self, request_id: str | None) -> RecordView | None:
        """One request, the last one for None; None when it is not known any more."""
        return find_decision(self._requests, request_id)

    async def health(self) -> Mapping[str, HealthView]:
        """How endpoints have answered."""
        return endpoints_health(self._requests)

    async def traffic(self) -> Mapping[str, Recent]:
        """What was sent where lately."""
        return self._requests.recent_traffic()

    def configuration(self) -> ConfigView:
        """What is in use."""
        return self._config.view()

    def pool_problem(self) -> str | None:
        """Why what is known of the pool may be old."""
        return self._pool_problem()


def last_decisions(requests: RequestSide, limit: int) -> list[RecordSummary]:
    """Those that this process remembers, the newest first."""
    return [] if requests.records is None else requests.records.last(limit)


def find_decision(requests: RequestSide, request_id: str | None) -> RecordView | None:
    """A request that this process remembers, the last one for None."""
    return None if requests.records is None else requests.records.find(request_id)


def endpoints_health(requests: RequestSide) -> dict[str, HealthView]:
    """How endpoints have answered this process, by key."""
    return {
        key: HealthView(
            one.state.value, one.consecutive_failures, one.ejections, one.next_probe_seconds
        )
        for key, one in requests.health.views().items()
    }
