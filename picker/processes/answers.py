"""What a serving process answers to people's questions, and what all of them together say."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence

import msgspec

from picker.admin.sources import ConfigView, HealthView
from picker.admin.traffic import Recent, summed
from picker.app.admin_source import endpoints_health, find_decision, last_decisions
from picker.app.config_status import ConfigStatus
from picker.app.request_side import RequestSide
from picker.decisions.record_views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView
from picker.outliers.breaker import EndpointState
from picker.processes.messages import Subject
from picker.processes.serving import Serving

_encode = msgspec.msgpack.encode
_summaries = msgspec.msgpack.Decoder(list[RecordSummary])
_record = msgspec.msgpack.Decoder(RecordView | None)
_traffic = msgspec.msgpack.Decoder(dict[str, Recent])
_health = msgspec.msgpack.Decoder(dict[str, HealthView])
# What an endpoint is to most requests when processes disagree: the first of these that any says.
_STATES = tuple(
    state.value
    for state in (
        EndpointState.EJECTED,
        EndpointState.ON_TRIAL,
        EndpointState.SUSPECT,
        EndpointState.HEALTHY,
    )
)


def answer(requests: RequestSide, subject: Subject, argument: str) -> bytes:
    """What this process says, packed."""
    if subject is Subject.DECISIONS:
        return _encode(last_decisions(requests, int(argument)))
    if subject is Subject.DECISION:
        return _encode(find_decision(requests, argument or None))
    if subject is Subject.TRAFFIC:
        return _encode(requests.recent_traffic())
    return _encode(endpoints_health(requests))


class FleetAdmin:
    """An `AdminSource` that asks all serving processes; one that does not answer is left out."""

    def __init__(
        self,
        members: Callable[[], Sequence[Serving]],
        config: ConfigStatus,
        pool_problem: Callable[[], str | None],
    ) -> None:
        self._members = members
        self._config = config
        self._pool_problem = pool_problem

    async def queues(self) -> QueuesView:
        """Flow control is off: it holds in one process only."""
        return QueuesView()

    async def decisions(self, limit: int) -> Sequence[RecordSummary]:
        """The last requests of all, the newest first."""
        answers = await self._ask(Subject.DECISIONS, str(limit))
        every = [one for content in answers for one in _summaries.decode(content)]
        return heapq.nlargest(limit, every, key=lambda one: one.received_unix_seconds)

    async def decision(self, request_id: str | None) -> RecordView | None:
        """One request, the last one for None; of several with its id the newest."""
        if request_id == "":
            return None  # what none of them has; it would mean the last one to them
        answers = await self._ask(Subject.DECISION, request_id or "")
        found = [one for content in answers if (one := _record.decode(content)) is not None]
        return max(found, key=lambda one: one.summary.received_unix_seconds, default=None)

    async def health(self) -> Mapping[str, HealthView]:
        """How endpoints have answered: the worst that any process knows of each."""
        merged: dict[str, HealthView] = {}
        for content in await self._ask(Subject.HEALTH, ""):
            for key, view in _health.decode(content).items():
                known = merged.get(key)
                if known is None or _rank(view) < _rank(known):
                    merged[key] = view
        return merged

    async def traffic(self) -> Mapping[str, Recent]:
        """What all of them sent where lately."""
        return summed(map(_traffic.decode, await self._ask(Subject.TRAFFIC, "")))

    def pool_problem(self) -> str | None:
        """Why what is known of the pool may be old."""
        return self._pool_problem()

    def configuration(self) -> ConfigView:
        """What is in use."""
        return self._config.view()

    async def _ask(self, subject: Subject, argument: str) -> list[bytes]:
        members = self._members()
        answers = await asyncio.gather(*(one.answer(subject, argument) for one in members))
        return [content for content in answers if content is not None]


def _rank(view: HealthView) -> int:
    return _STATES.index(view.state) if view.state in _STATES else len(_STATES)
