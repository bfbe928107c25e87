"""What the HTTP port answers with: JSON, and JSON for errors too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web


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
