"""The page at `/`, and the files that it is made of."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

INDEX = "index.html"
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page_files() -> dict[str, bytes]:
    """Every file of the page, by name."""
    folder = files("picker.admin").joinpath("page")
    found = [one for one in folder.iterdir() if _suffix(one.name) in CONTENT_TYPES]
    return {one.name: one.read_bytes() for one in found}


class PageRoutes:
    """Owns the files, read once. Nothing else can be asked for: names are looked up here."""

    def __init__(self) -> None:
        self._files = page_files()

    def routes(self) -> list[web.RouteDef]:
        """The page, and what it loads."""
        return [web.get("/", self._show_index), *self.file_routes()]

    def file_routes(self) -> list[web.RouteDef]:
        """What pages load."""
        return [web.get("/page/{name}", self._show_file)]

    async def _show_index(self, _request: web.Request) -> web.Response:
        return self._file(INDEX)

    async def _show_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._file(name)

    def _file(self, name: str) -> web.Response:
        kind = CONTENT_TYPES[_suffix(name)]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8")


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
