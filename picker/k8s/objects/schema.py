"""msgspec structs → the structural schema that an API server checks objects by.

A field is required when it has no default. A default that is a text is the API's own; None, an
empty collection and an empty struct mean that the field may be left out. `None` in a type means no
more than that: an API server drops nulls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from picker.pool.object_parts import END, ObjectMeta

Schema: TypeAlias = dict[str, Any]

_SCALARS: Final[dict[type, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
}
_LENGTHS: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_IMPLIED: Final = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def schema_of(annotation: Any) -> Schema:
    """The schema of a type. Raises TypeError for one that no schema can say."""
    plain, metas = _parts(annotation)
    schema = _plain_schema(plain)
    for meta in metas:
        schema |= _limits(meta, schema["type"])
        schema |= meta.extra_json_schema or {}
        if meta.description is not None:
            schema["description"] = meta.description
    low, high = _IMPLIED.get(schema.get("format", ""), (None, None))
    if schema.get("minimum") == low:
        schema.pop("minimum", None)
    if schema.get("maximum") == high:
        schema.pop("maximum", None)
    return schema


def _parts(annotation: Any) -> tuple[Any, list[Meta]]:
    """A type without its annotations and `| None`, and the annotations, innermost first."""
    metas: list[Meta] = []
    while True:
        if get_origin(annotation) in (Union, UnionType):
            kinds = [one for one in get_args(annotation) if one is not NoneType]
            if len(kinds) != 1:
                raise TypeError(f"{annotation} is several types at once")
            annotation = kinds[0]
        elif get_origin(annotation) is Annotated:
            annotation, *found = get_args(annotation)
            metas = [*(one for one in found if isinstance(one, Meta)), *metas]
        else:
            return annotation, metas


def _plain_schema(kind: Any) -> Schema:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is ObjectMeta:
        return {"type": "object"}  # an API server knows better than any schema
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct_schema(kind)
    if origin is Literal:
        return {"type": "string", "enum": list(inner)}
    if origin is tuple and inner[1:] == (...,):
        return {"type": "array", "items": schema_of(inner[0])}
    if origin in (dict, Mapping) and inner[0] is str:
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    if kind in _SCALARS:
        return dict(_SCALARS[kind])
    raise TypeError(f"{kind} has no place in a schema")


def _struct_schema(kind: type[msgspec.Struct]) -> Schema:
    properties: Schema = {}
    required = []
    for field in msgspec.structs.fields(kind):
        schema = schema_of(field.type)
        if isinstance(field.default, str):
            schema["default"] = field.default
        if field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = schema
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = sorted(required)
    return schema | {"description": inspect.getdoc(kind) or ""}


def _limits(meta: Meta, kind: str) -> Schema:
    shortest, longest = _LENGTHS.get(kind, ("", ""))
    pattern = meta.pattern
    limits = {
        "minimum": meta.ge,
        "maximum": meta.le,
        shortest: meta.min_length,
        longest: meta.max_length,
        "pattern": None if pattern is None else pattern.replace(END, "$"),
    }
    return {name: limit for name, limit in limits.items() if limit is not None}
