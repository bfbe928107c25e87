"""Responses of the HTTP port: JSON, also for errors, and pages made in turns."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

T = TypeVar("T")


class Turns:
    """Yields to the event loop between the pieces of a page; makes one page at a time."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def collect(self, pieces: Iterable[T]) -> list[T]:
        made = []
        async with self._one_at_a_time:
            for piece in pieces:
                made.append(piece)
                await asyncio.sleep(0)
        return made


def as_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def as_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    answer = as_json({"error": message}, status)
    answer.headers.update(headers or {})
    return answer


class InvalidQueryError(Exception): ...


def whole_number(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    # `int` accepts more than ASCII digits: spaces, underscores, digits of other scripts.
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    raise InvalidQueryError(f"{name} must be a number from {least} to {most}, not '{text[:40]}'")
