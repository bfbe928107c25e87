"""What people and monitoring are shown of one pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from picker.admin.empty_source import EmptySource
from picker.admin.endpoint_routes import EndpointRoutes
from picker.admin.monitoring_routes import MonitoringRoutes
from picker.admin.page_routes import PageRoutes
from picker.admin.request_routes import RequestRoutes
from picker.admin.sampling import HistorySampler
from picker.admin.sources import AdminSource
from picker.datalayer.datastore import Datastore
from picker.datalayer.inflight import InflightLoad
from picker.metrics import PickerMetrics

Page = Callable[[], Awaitable[bytes]]


class PoolFace:
    """Owns the pool's last two minutes."""

    def __init__(
        self,
        metrics: PickerMetrics,
        datastore: Datastore,
        inflight: InflightLoad,
        source: AdminSource | None = None,
        page: Page | None = None,
    ) -> None:
        """Without a `source` there are no queues and decisions. `page` renders `/metrics` where
        more than `metrics` is to be told.
        """

        async def rendered() -> bytes:
            return metrics.render()

        self.metrics = metrics
        self._page = page or rendered
        self._source = source or EmptySource()
        self._datastore, self._inflight = datastore, inflight
        self.sampler = HistorySampler(datastore, inflight, self._source)

    def problem(self) -> str | None:
        """Why what is told of the pool may be old."""
        return self._source.pool_problem()

    def routes(self, is_ready: Callable[[], bool], prefix: str = "") -> list[web.RouteDef]:
        """All pages, each below `prefix`, which begins with a slash unless it is empty."""
        history = self.sampler.history
        found = [
            *MonitoringRoutes(self._page, is_ready, self.problem).routes(),
            *EndpointRoutes(self._datastore, self._inflight, self._source, history).routes(),
            *RequestRoutes(self._source).routes(),
            *PageRoutes().routes(),
        ]
        return [web.get(prefix + one.path, one.handler) for one in found]
