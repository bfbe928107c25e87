"""`/endpoints`: the pool as it is known, and its last two minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiohttp import web

from picker.admin.answers import as_json, encoded, whole_number
from picker.admin.endpoint_views import HEALTHY, EndpointView
from picker.admin.history import INTERVAL_SECONDS, SAMPLES, History, series
from picker.admin.sources import AdminSource, HealthView
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.types import Candidate


class EndpointRoutes:
    """Tells an `EndpointsView`, piece by piece: of a thousand endpoints it is a megabyte or two.

    `clock` is the one that scrapes are timed with, in seconds.
    """

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
        cut = self._history.cut(samples)
        endpoints = await encoded(candidates, lambda one: self._describe(one, health))
        if not samples:
            return as_json({"endpoints": endpoints})
        rows = await encoded(cut.rows.values(), series)
        history = {
            "last": cut.last,
            "interval_seconds": INTERVAL_SECONDS,
            "endpoints": dict(zip(cut.rows, rows, strict=True)),
        }
        return as_json({"endpoints": endpoints, "history": history})

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
