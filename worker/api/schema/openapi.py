"""The OpenAPI document; `python -m worker.api.schema.openapi` prints it with every route."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from worker.api.schema.parse import schema_hook
from worker.api.schema.routes import MODEL_PATH, Query, Route, all_routes, is_guarded

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_EVERYWHERE = (400, 408, 431, 500)
_WITH_BODY = (413,)
_EMPTY = frozenset({"health", "ping", "ping_post"})  # their errors have no body either

# One event; a stream ends with the data `[DONE]`.
_EVENT: Json = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def _text(name: str, place: str, description: str, **more: Any) -> Json:
    schema = {"type": "string"}
    return {"name": name, "in": place, **more, "description": description, "schema": schema}


_HEADERS = (
    _text(
        "x-request-id",
        "header",
        "Becomes part of the response's id, when it is short and printable",
    ),
    _text(
        "endpoint-load-metrics-format",
        "header",
        "text or json: the header endpoint-load-metrics reports the load, in an answer that is not"
        " streamed",
    ),
)
_MODEL_ID = _text("id", "path", "A served name; slashes in it may be escaped or not", required=True)


def package_version() -> str:
    """Return the package's version; "0" when it is not installed."""
    try:
        return version("pointsman")
    except PackageNotFoundError:
        return "0"


def document(routes: Iterable[Route], *, has_keys: bool) -> Json:
    """Return the document (OpenAPI 3.1). `has_keys`: some routes ask for an API key."""
    routes = tuple(routes)
    # Together, so that routes share components.
    schemas, components = _schemas(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        operation = _operation(route, schemas, has_keys=has_keys)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pointsman worker",
            "version": package_version(),
            "description": "An OpenAI-compatible model server. Unknown fields are refused (400).",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"bearer": bearer}
    return document


def document_bytes(routes: Iterable[Route], *, has_keys: bool) -> bytes:
    return msgspec.json.encode(document(routes, has_keys=has_keys))


def _schemas(routes: Sequence[Route]) -> tuple[dict[Any, Json], Json]:
    kinds: list[Any] = []
    for route in routes:
        errors = (route.errors.kind, type(route.errors.unauthorized))
        for kind in (*errors, *_alternatives(route.body), *_alternatives(route.answer)):
            if kind not in kinds:
                kinds.append(kind)
    schemas, components = msgspec.json.schema_components(
        kinds, schema_hook=schema_hook, ref_template=_REFERENCE
    )
    # A turn has content or reasoning: JSON schema requires that of the whole object.
    said = ("content", "reasoning", "reasoning_content", "tool_calls")
    components["ChatMessage"]["anyOf"] = [{"required": [name]} for name in said]
    return dict(zip(kinds, schemas, strict=True)), components


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if kind is None:
        return ()
    return kind if isinstance(kind, tuple) else (kind,)


def _schema_of(kind: Any, schemas: Mapping[Any, Json]) -> Json:
    alternatives = [schemas[k] for k in _alternatives(kind)]
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _operation(route: Route, schemas: Mapping[Any, Json], *, has_keys: bool) -> Json:
    guarded = has_keys and is_guarded(route)
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": _responses(route, schemas, guarded=guarded),
    }
    parameters = [_parameter(field) for field in route.query]
    if route.path == MODEL_PATH:
        parameters.append(_MODEL_ID)
    if route.streams:
        parameters.extend(_HEADERS)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"application/json": {"schema": _schema_of(route.body, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    if guarded:
        operation["security"] = [{"bearer": []}]
    return operation


def _responses(route: Route, schemas: Mapping[Any, Json], *, guarded: bool) -> Json:
    responses: Json = {"200": _success(route, schemas)}
    statuses = {*_EVERYWHERE, *route.statuses, *(_WITH_BODY if route.body is not None else ())}
    if guarded:
        statuses.add(401)
    for status in sorted(statuses):
        response: Json = {"description": HTTPStatus(status).phrase}
        kind = type(route.errors.unauthorized) if status == 401 else route.errors.kind
        if not (status == 503 and route.name in _EMPTY):
            response["content"] = {"application/json": {"schema": schemas[kind]}}
        responses[str(status)] = response
    return responses


def _success(route: Route, schemas: Mapping[Any, Json]) -> Json:
    if route.answer is None:
        return {"description": "Done"}
    content: Json = {route.media_type: {"schema": _schema_of(route.answer, schemas)}}
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return {"description": "The answer", "content": content}


def _parameter(field: Query) -> Json:
    schema = msgspec.json.schema(field.kind)
    if field.many:
        schema = {"type": "array", "items": schema, "minItems": 1}
    if field.default is not None:
        schema["default"] = field.default
    return {"name": field.name, "in": "query", "description": field.summary, "schema": schema}


def main() -> int:
    text = msgspec.json.format(document_bytes(all_routes(), has_keys=True), indent=2)
    sys.stdout.write(text.decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
