"""What people and monitoring are shown of one pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from picker.admin.empty_source import EmptySource
from picker.admin.endpoint_routes import EndpointRoutes
from picker.admin.merged_metrics import of_pool
from picker.admin.monitoring_routes import MonitoringRoutes
from picker.admin.page_routes import PageRoutes, one_page, pool_page
from picker.admin.request_routes import RequestRoutes
from picker.admin.sampling import HistorySampler
from picker.admin.sources import AdminSource
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad

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

        async def rendered_of_several() -> bytes:
            return of_pool(metrics)

        self.metrics = metrics
        self._page, self._page_of_several = page or rendered, rendered_of_several
        self._source = source or EmptySource()
        self._datastore, self._inflight = datastore, inflight
        self.sampler = HistorySampler(datastore, inflight, self._source)

    def problem(self) -> str | None:
        """Why what is told of the pool may be old."""
        return self._source.pool_problem()

    @property
    def num_endpoints(self) -> int:
        """How many there are."""
        return len(self._datastore.snapshot().candidates)

    @property
    def num_under_way(self) -> int:
        """How many requests were sent somewhere and are not over."""
        return self._inflight.own_total

    def routes(self, is_ready: Callable[[], bool], key: str = "") -> list[web.RouteDef]:
        """All pages. `key` is what the pool is called where it is one of several; then what is not
        its own is left to the process to tell.
        """
        page = self._page_of_several if key else self._page
        history = self.sampler.history
        return [
            *MonitoringRoutes(page, is_ready, self.problem).routes(),
            *EndpointRoutes(self._datastore, self._inflight, self._source, history).routes(),
            *RequestRoutes(self._source).routes(),
            *PageRoutes(pool_page(key) if key else one_page()).routes(),
        ]
