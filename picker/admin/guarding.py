"""The guard of the HTTP port: it asks for tokens if the port is protected, and blocks foreign web
pages.

A foreign page in a browser on this machine cannot read the responses, since no header allows
another origin. But it can make a name of its own resolve to 127.0.0.1 (DNS rebinding), so that the
browser takes page and port for one origin. On a loopback address requests must therefore name the
loopback or the name that was bound. Scrapers and probes use names of their own and are exempt.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from base.series import Counter
from picker.admin.answers import InvalidQueryError, as_error
from picker.admin.loopback import is_loopback

log = logging.getLogger(__name__)

# Scrapers and probes use host names of their own.
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
# Takes a token and a path; returns status and reason of a refusal, None if access is allowed.
Authorize: TypeAlias = Callable[[str, str], Awaitable[tuple[int, str] | None]]
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d{0,5})?", re.IGNORECASE)


class PageNames:
    """Names pages; `aliases` let pages of several pools have the names of a single pool's pages."""

    def __init__(self, aliases: Mapping[str, str] = _NOTHING) -> None:
        self._aliases = aliases

    def of(self, request: web.Request) -> str:
        """Return the route up to its first variable part, so the number of names is bounded."""
        resource = request.match_info.route.resource
        if resource is None:
            return "/"
        written = resource.canonical
        return self._aliases.get(written, written).split("{")[0]


class HostCheck:
    """Checks `Host` headers; any is valid until `bound` sees that all addresses are loopback."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None

    def bound(self, wanted: str, addresses: Iterable[str]) -> None:
        """Allow only `wanted` and loopback names if all `addresses` are loopback addresses."""
        # Other machines reach any other address by names that the picker cannot know.
        if all(map(is_loopback, addresses)):
            self._names = frozenset({wanted.lower()})

    def allows(self, header: str | None) -> bool:
        if self._names is None:
            return True
        parts = _HOST.fullmatch(header or "")
        if parts is None:
            return False
        name = parts[1].strip("[]").lower().removesuffix(".")
        return is_loopback(name) or name in self._names


def guarding(check: HostCheck, failures: Counter, names: PageNames) -> Middleware:
    """Return a middleware that refuses hosts by `check` and turns all errors into JSON."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
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
        except Exception:  # the client gets a response, the log the reason
            resource = request.match_info.route.resource  # has no text of the client
            page = "a page" if resource is None else resource.canonical
            failures.labels(page).inc()
            log.exception("%s cannot be answered", page)
            return as_error(500, "the page failed; the picker's log has the reason")

    return guard


async def add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


def authorizing(authorize: Authorize, names: PageNames) -> Middleware:
    """Return a middleware that refuses (401, 403, 503) what `authorize` does not allow."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = names.of(request)
        if path in OPEN:
            return await handler(request)
        # Two headers are ambiguous, so neither counts.
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
