"""The guard of the HTTP port: where it is protected it asks for tokens, and it always keeps other
people's web pages away.

A page from elsewhere in a browser on this machine cannot read the answers: no header allows another
origin to. What is left is a name of its own that it lets point to 127.0.0.1 (DNS rebinding), which
makes the browser believe that port and page are of one origin. So on a loopback address requests
have to name the loopback, or the name that was bound. Monitoring is exempt: scrapers and probes use
names of their own, and there is nothing of a request in what they get.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware

from picker.admin.answers import InvalidQueryError, as_error
from picker.admin.loopback import is_loopback
from picker.metrics.series import Counter

log = logging.getLogger(__name__)

MONITORING = frozenset({"/metrics", "/healthz", "/readyz"})
_CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OPEN = frozenset({"/healthz", "/readyz"})  # for probes, which have no tokens
_BEARER = "bearer "
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="pointsman"'}
_NOTHING: Mapping[str, str] = MappingProxyType({})
# Asked with a token and a path; answers the status and why, None for a request that is allowed.
Authorize: TypeAlias = Callable[[str, str], Awaitable[tuple[int, str] | None]]
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d{0,5})?", re.IGNORECASE)


class PageNames:
    """What a request asks for, whichever pool it is about: by that it is judged who may have it.

    The pages of each of several pools are called what they would be called if it were the only one;
    `aliases` has these names by the routes as they are written.
    """

    def __init__(self, aliases: Mapping[str, str] = _NOTHING) -> None:
        self._aliases = aliases

    def of(self, request: web.Request) -> str:
        """As its route is written, up to the first part that varies: there are only so many."""
        resource = request.match_info.route.resource
        if resource is None:
            return "/"
        written = resource.canonical
        return self._aliases.get(written, written).split("{")[0]


class HostCheck:
    """Knows which `Host` headers are fine: any, unless all bound addresses are loopback."""

    def __init__(self) -> None:
        """Everything is fine until `bound`."""
        self._names: frozenset[str] | None = None

    def bound(self, wanted: str, addresses: Iterable[str]) -> None:
        """The port listens at `addresses`, having been asked to at `wanted`."""
        if all(map(is_loopback, addresses)):
            self._names = frozenset({wanted.lower()})

    def allows(self, header: str | None) -> bool:
        """Whether a request with this `Host` is answered."""
        if self._names is None:
            return True
        parts = _HOST.fullmatch(header or "")
        if parts is None:
            return False
        name = parts[1].strip("[]").lower().removesuffix(".")
        return is_loopback(name) or name in self._names


def guarding(check: HostCheck, failures: Counter, names: PageNames) -> Middleware:
    """Refuses what `check` does not allow, and makes JSON of all errors; those that nobody foresaw
    are counted by their page. `names` says which pages are for monitoring.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        is_exempt = names.of(request) in MONITORING
        if not is_exempt and not check.allows(request.headers.get("Host")):
            text = "this port answers requests for localhost only; use http://127.0.0.1 or a tunnel"
            return as_error(403, text)
        try:
            return await handler(request)
        except InvalidQueryError as error:
            return as_error(400, str(error))
        except web.HTTPMethodNotAllowed as error:
            allowed = {"Allow": error.headers["Allow"]}
            return as_error(405, f"{request.method[:20]} is not possible here", allowed)
        except web.HTTPNotFound:
            return as_error(404, "there is no such page")
        except Exception:  # the client gets an answer, the log the reason
            page = _page_of(request)
            failures.labels(page).inc()
            log.exception("%s cannot be answered", page)
            return as_error(500, "the page failed; the picker's log has the reason")

    return guard


def _page_of(request: web.Request) -> str:
    """As it is called here, whatever a client made of it."""
    resource = request.match_info.route.resource
    return "a page" if resource is None else resource.canonical


async def add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Whatever the answer is."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


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
