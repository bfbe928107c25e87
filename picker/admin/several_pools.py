"""The HTTP port of a picker of several pools.

All that a picker of one pool shows is there for each of them below `/pools/NAME`, so that whatever
speaks with a picker can be given that address. At the top there are the metrics of all, the health
of the process, and the list of the pools, for programs and for people.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from html import escape
from typing import Final

import msgspec
from aiohttp import web

from picker.admin.answers import as_error, as_json
from picker.admin.monitoring_routes import MonitoringRoutes
from picker.admin.page_routes import PageRoutes
from picker.admin.pool_face import PoolFace

PREFIX: Final = "/pools/"
_MOVED: Final = ("/endpoints", "/queues", "/decisions", "/decisions/{id}", "/config")
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Pools · Pointsman</title>
<link rel="stylesheet" href="page/style.css">
</head>
<body>
<main>
<h1>Pools of this picker</h1>
<ul>
{items}
</ul>
</main>
</body>
</html>
"""


class PoolView(msgspec.Struct, frozen=True):
    """One pool, for programs: what it is called, where more is told of it, and how it is."""

    name: str
    path: str
    ready: bool
    problem: str | None = None


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

    @property
    def faces(self) -> Sequence[PoolFace]:
        """Those of all pools."""
        return [face for face, _ in self._pools.values()]

    def routes(self) -> list[web.RouteDef]:
        """Everything."""
        found = [*self._monitoring.routes(), web.get("/", self._show_page)]
        found += PageRoutes().file_routes()
        found += [web.get("/pools", self._show_pools)]
        found += [web.get(path, self._say_where) for path in _MOVED]
        for key, (face, is_ready) in self._pools.items():
            found += face.routes(is_ready, PREFIX + key)
            found.append(web.get(PREFIX + key, self._add_slash))
        return found

    def views(self) -> list[PoolView]:
        """The pools as programs are told of them."""
        return [
            PoolView(key, f"{PREFIX}{key}/", is_ready(), face.problem())
            for key, (face, is_ready) in self._pools.items()
        ]

    async def _show_pools(self, _request: web.Request) -> web.Response:
        return as_json({"pools": self.views()})

    async def _show_page(self, _request: web.Request) -> web.Response:
        items = "\n".join(
            f'<li><a href="{escape(one.path[1:])}">{escape(one.name)}</a> '
            f"{'ready' if one.ready else 'not ready'}"
            f"{'' if one.problem is None else ': ' + escape(one.problem)}</li>"
            for one in self.views()
        )
        return web.Response(text=_PAGE.format(items=items), content_type="text/html")

    async def _add_slash(self, request: web.Request) -> web.Response:
        """The page's parts are beside it, so it has to end with a slash; relative, so that it holds
        behind a proxy too.
        """
        last = request.path.rpartition("/")[2]
        return web.Response(status=308, headers={"Location": f"{last}/"})

    async def _say_where(self, request: web.Request) -> web.Response:
        """One pool must not be taken for another."""
        places = ", ".join(f"{PREFIX}{key}{request.path[:200]}" for key in self._pools)
        return as_error(404, f"this picker serves several pools; ask one of them: {places}")
