"""`/endpoints`: the pool as it is known, and its last two minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiohttp import web

from picker.admin.answers import as_json, whole_number
from picker.admin.endpoint_views import HEALTHY, EndpointsView, EndpointView
from picker.admin.history import SAMPLES, History
from picker.admin.sources import AdminSource, HealthView
from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.types import Candidate


class EndpointRoutes:
    """`clock` is the one that scrapes are timed with, in seconds."""

    def __init__(
        self,
        datastore: Datastore,
        inflight: InflightLoad,
        source: AdminSource,
        history: History,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._datastore = datastore
        self._inflight = inflight
        self._source = source
        self._history = history
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """One; `?history=N` adds the last N samples."""
        return [web.get("/endpoints", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        samples = whole_number(request, "history", default=0, least=0, most=SAMPLES)
        health = await self._source.health()
        candidates = self._datastore.snapshot().candidates
        return as_json(
            EndpointsView(
                endpoints=tuple(self._describe(candidate, health) for candidate in candidates),
                history=self._history.view(samples) if samples else None,
            )
        )

    def _describe(self, candidate: Candidate, health: Mapping[str, HealthView]) -> EndpointView:
        endpoint, last = candidate.endpoint, candidate.last_metrics
        recent = self._history.latest(candidate.key)
        return EndpointView(
            key=candidate.key,
            name=endpoint.name,
            namespace=endpoint.namespace,
            address=endpoint.host_port,
            labels=dict(endpoint.labels),
            health=health.get(candidate.key, HEALTHY),
            inflight_requests=self._inflight.requests(candidate.key),
            metrics=candidate.metrics,
            last_metrics=last,
            metrics_age_seconds=(
                None if last is None else max(0.0, self._clock() - last.updated_at_seconds)
            ),
            requests_per_second=recent.requests_per_second,
            prefix_hit_share=recent.prefix_hit_share,
        )
