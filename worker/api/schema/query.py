"""Query strings → checked values, by the fields a route declares."""

from __future__ import annotations

from typing import Any

import msgspec

from worker.api.http.exchange import Exchange
from worker.api.schema.routes import Query, Route
from worker.errors import RequestError


def query_values(exchange: Exchange, route: Route) -> dict[str, Any]:
    """A value for every field of the route. Raises 400 for an unknown or repeated field and for a
    value that does not fit.
    """
    given: dict[str, list[str]] = {}
    for name, value in exchange.query():
        given.setdefault(name, []).append(value)
    known = {field.name for field in route.query}
    for name in given:
        if name not in known:
            raise RequestError(f"Unknown query field `{name[:100]}`", param=name[:100])
    return {field.name: _value(field, given.get(field.name)) for field in route.query}


def _value(field: Query, texts: list[str] | None) -> Any:
    if texts is None:
        return field.default
    if len(texts) > 1 and not field.many:
        raise RequestError(f"Query field `{field.name}` is given more than once", param=field.name)
    kind = list[field.kind] if field.many else field.kind  # type: ignore[name-defined]
    try:
        if kind is bool:
            return msgspec.json.decode(texts[0], type=bool)  # true or false, and nothing else
        return msgspec.convert(texts if field.many else texts[0], kind, strict=False)
    except msgspec.MsgspecError as error:
        raise RequestError(f"Query field `{field.name}`: {error}", param=field.name) from error
