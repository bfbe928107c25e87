"""Asks who may read the HTTP port, where it is protected: everything but the two health pages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from picker.admin.page_names import PageNames

log = logging.getLogger(__name__)

OPEN = frozenset({"/healthz", "/readyz"})  # for probes, which have no tokens
_BEARER = "bearer "
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="pointsman"'}

# Asked with a token and a path; answers the status and why, None for a request that is allowed.
Authorize: TypeAlias = Callable[[str, str], Awaitable[tuple[int, str] | None]]


def authorizing(authorize: Authorize, names: PageNames) -> Middleware:
    """Answer only requests that `authorize` lets through; 401, 403 and 503 say why not. It is asked
    for what `names` calls the page.
    """

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        path = names.of(request)
        if path in OPEN:
            return await handler(request)
        given = request.headers.getall("Authorization", [])
        token = given[0][len(_BEARER) :].strip() if len(given) == 1 else ""
        if not token or not given[0].lower().startswith(_BEARER):
            return _refused(401, "give a bearer token of the cluster in the header Authorization")
        refusal = await authorize(token, path)
        return await handler(request) if refusal is None else _refused(*refusal)

    return check


def _refused(status: int, why: str) -> web.Response:
    headers = _CHALLENGE if status == 401 else None
    return web.Response(status=status, text=f"{why}\n", headers=headers)
