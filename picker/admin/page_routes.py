"""The page at `/`, and the files that it is made of."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

from aiohttp import web

CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_INDEX, _POOLS = "index.html", "pools.html"
_PLACE = '<p id="pool" hidden></p>'  # in the page, for which of several pools it is about
_WHICH = (
    '<nav aria-label="Pools" class="which"><a href="{up}">All pools</a>'
    ' <span aria-hidden="true">/</span> <strong id="pool">{key}</strong></nav>'
)


@cache
def page_files() -> dict[str, bytes]:
    """Every file of the pages, by name."""
    folder = files("picker.admin").joinpath("page")
    found = [one for one in folder.iterdir() if _suffix(one.name) in CONTENT_TYPES]
    return {one.name: one.read_bytes() for one in found}


def one_page() -> bytes:
    """The page of a picker's only pool."""
    return page_files()[_INDEX]


def pool_page(key: str) -> bytes:
    """The page of the pool `key` of several; it is as many folders below their list as this has
    parts, and one more.
    """
    which = _WHICH.format(up="../" * (key.count("/") + 2), key=escape(key))
    title = f"<title>{escape(key)} · Pointsman</title>"
    text = one_page().decode()
    return text.replace(_PLACE, which).replace("<title>Pointsman</title>", title).encode()


def pools_page() -> bytes:
    """The list of several pools."""
    return page_files()[_POOLS]


class PageRoutes:
    """Knows one page and all files. Nothing else can be asked for: names are looked up here."""

    def __init__(self, page: bytes) -> None:
        self._page, self._files = page, page_files()

    def routes(self) -> list[web.RouteDef]:
        """The page, and what it loads."""
        return [web.get("/", self._show_page), web.get("/page/{name}", self._show_file)]

    async def _show_page(self, _request: web.Request) -> web.Response:
        return _answer(self._page, _INDEX)

    async def _show_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return _answer(self._files[name], name)


def _answer(content: bytes, name: str) -> web.Response:
    kind = CONTENT_TYPES[_suffix(name)]
    return web.Response(body=content, content_type=kind, charset="utf-8")


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
