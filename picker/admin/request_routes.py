"""`/queues`, `/decisions` and `/config`: who waits, who went where and why, by which rules."""

from __future__ import annotations

from aiohttp import web

from picker.admin.answers import as_error, as_json, whole_number
from picker.admin.sources import AdminSource

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
LAST = "last"


class RequestRoutes:
    """Passes on what the source says."""

    def __init__(self, source: AdminSource) -> None:
        self._source = source

    def routes(self) -> list[web.RouteDef]:
        """All four."""
        return [
            web.get("/queues", self._show_queues),
            web.get("/decisions", self._show_decisions),
            web.get("/decisions/{id}", self._show_decision),
            web.get("/config", self._show_config),
        ]

    async def _show_queues(self, _request: web.Request) -> web.Response:
        return as_json(await self._source.queues())

    async def _show_decisions(self, request: web.Request) -> web.Response:
        limit = whole_number(request, "limit", DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
        return as_json({"decisions": list(await self._source.decisions(limit))[:limit]})

    async def _show_decision(self, request: web.Request) -> web.Response:
        """An id is anything that a client chose; it comes escaped as one part of the path."""
        request_id = request.match_info["id"]
        is_last = request_id == LAST
        decision = await self._source.decision(None if is_last else request_id)
        if decision is not None:
            return as_json(decision)
        if is_last:
            return as_error(404, "there was no request yet")
        text = f"nothing is known of request '{request_id[:200]}', or not any more"
        return as_error(404, text)

    async def _show_config(self, _request: web.Request) -> web.Response:
        return as_json(self._source.configuration())
