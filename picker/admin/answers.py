"""What the HTTP port answers with: JSON, and JSON for errors too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

TURN = 50  # a millisecond or two of work
T = TypeVar("T")


def as_json(value: Any, status: int = 200) -> web.Response:
    """Anything that msgspec can encode."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def as_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """`{"error": message}`."""
    answer = as_json({"error": message}, status)
    answer.headers.update(headers or {})
    return answer


async def encoded(values: Iterable[T], what: Callable[[T], Any]) -> list[msgspec.Raw]:
    """What is to be told of each of very many; requests on this loop get their turn meanwhile."""
    done = []
    for number, value in enumerate(values, 1):
        done.append(msgspec.Raw(msgspec.json.encode(what(value))))
        if not number % TURN:
            await asyncio.sleep(0)
    return done


class InvalidQueryError(Exception):
    """A parameter of the query that cannot be used; says which, and what may stand there."""


def whole_number(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A parameter of the query. Raises `InvalidQueryError`."""
    text = request.query.get(name)
    if text is None:
        return default
    # `int` takes more than digits: spaces, underscores, digits of other scripts.
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    raise InvalidQueryError(f"{name} must be a number from {least} to {most}, not '{text[:40]}'")
