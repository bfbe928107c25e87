"""The HTTP port of a picker of several pools.

All that a picker of one pool shows is there for each of them below `/pools/NAME`, so that whatever
speaks with a picker can be given that address. At the top there are the metrics of all, the health
of the process, and the list of the pools, for programs and for people.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from picker.admin.answers import as_error, as_json
from picker.admin.monitoring_routes import MonitoringRoutes
from picker.admin.page_names import PageNames
from picker.admin.page_routes import PageRoutes, pools_page
from picker.admin.pool_face import PoolFace
from picker.admin.pool_views import LIST, PREFIX, PoolsView, PoolView
from picker.admin.server import AdminServer
from picker.metrics.series import Counter

_MOVED: Final = ("/endpoints", "/queues", "/decisions", "/decisions/{id}", "/config")
_SHOWN_LENGTH: Final = 200


class SeveralPools:
    """Owns the routes of all of them. `pools` are by what they are called, each with what says
    whether it is ready.
    """

    def __init__(
        self,
        pools: Mapping[str, tuple[PoolFace, Callable[[], bool]]],
        page: Callable[[], Awaitable[bytes]],
        is_ready: Callable[[], bool],
        problem: Callable[[], str | None],
    ) -> None:
        """`page` renders the metrics of all; `is_ready` and `problem` are about the process."""
        self._pools = dict(pools)
        self._monitoring = MonitoringRoutes(page, is_ready, problem)

    def server(self, failures: Counter) -> AdminServer:
        """The port. Who may see a page of one pool may see it of all: rights are asked for as if
        there were one.
        """
        routes, names = self._top(), {PREFIX + "{rest}": LIST}
        for key, (face, is_ready) in self._pools.items():
            for one in face.routes(is_ready, key):
                routes.append(web.get(PREFIX + key + one.path, one.handler))
                names.setdefault(PREFIX + key + one.path, one.path)
        # Last, for a pool NAMESPACE/metrics must not hide the page of a pool called NAMESPACE.
        for key in self._pools:
            routes.append(web.get(PREFIX + key, self._add_slash))
            names.setdefault(PREFIX + key, "/")
        faces = [face for face, _ in self._pools.values()]
        return AdminServer(routes, faces, failures, PageNames(names))

    def view(self) -> PoolsView:
        """The pools as programs are told of them."""
        return PoolsView(tuple(self._view(key) for key in self._pools))

    def _view(self, key: str) -> PoolView:
        face, is_ready = self._pools[key]
        return PoolView(
            name=key,
            path=f"{PREFIX}{key}/",
            ready=is_ready(),
            endpoints=face.num_endpoints,
            inflight_requests=face.num_under_way,
            problem=face.problem(),
        )

    def _top(self) -> list[web.RouteDef]:
        """What is not of a single pool."""
        return [
            *self._monitoring.routes(),
            *PageRoutes(pools_page()).routes(),
            web.get(LIST, self._show_pools),
            *(web.get(path, self._say_where) for path in _MOVED),
            web.get(PREFIX + "{rest:.*}", self._say_which),
        ]

    async def _show_pools(self, _request: web.Request) -> web.Response:
        return as_json(self.view())

    async def _add_slash(self, request: web.Request) -> web.Response:
        """The page's parts are beside it, so it has to end with a slash; relative, so that it holds
        behind a proxy too.
        """
        last = request.path.rpartition("/")[2]
        return web.Response(status=308, headers={"Location": f"{last}/"})

    async def _say_where(self, request: web.Request) -> web.Response:
        """One pool must not be taken for another."""
        asked = request.rel_url.raw_path[:_SHOWN_LENGTH]
        places = ", ".join(f"{PREFIX}{key}{asked}" for key in self._pools)
        return as_error(404, f"this picker serves several pools; ask one of them: {places}")

    async def _say_which(self, request: web.Request) -> web.Response:
        """No page of a pool."""
        asked = request.rel_url.raw_path.partition(PREFIX)[2]
        if any(f"{asked}/".startswith(f"{key}/") for key in self._pools):
            raise web.HTTPNotFound
        places = ", ".join(f"{PREFIX}{key}/" for key in self._pools)
        told = (
            f"there is no pool at {PREFIX}{asked[:_SHOWN_LENGTH]}; those of this picker: {places}"
        )
        return as_error(404, told)
