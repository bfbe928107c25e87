"""What a request asks for, whichever pool it is about: by that it is judged who may have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aiohttp import web

_NOTHING: Mapping[str, str] = MappingProxyType({})


class PageNames:
    """Calls the pages of each of several pools what they would be called if it were the only one.

    `told` are the names of routes that are not called as they are written.
    """

    def __init__(self, told: Mapping[str, str] = _NOTHING) -> None:
        self._told = told

    def of(self, request: web.Request) -> str:
        """As its route is written, up to the first part that varies: there are only so many."""
        resource = request.match_info.route.resource
        if resource is None:
            return "/"
        written = resource.canonical
        return self._told.get(written, written).split("{")[0]
