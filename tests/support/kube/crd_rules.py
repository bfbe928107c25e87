"""An API server's treatment of an object of a CustomResourceDefinition, from its file alone.

Unknown fields are pruned, nulls dropped and defaults filled in; then the structural schema (with
`jsonschema`), the uniqueness of lists that are maps, and the CEL rules (with
`common-expression-language`) are checked. Reasons and messages are those of a real server.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import cel
import jsonschema
import yaml

Place: TypeAlias = tuple[str | int, ...]
Schema: TypeAlias = dict[str, Any]

REQUIRED: Final = "FieldValueRequired"
INVALID: Final = "FieldValueInvalid"
TYPE_INVALID: Final = "FieldValueTypeInvalid"
NOT_SUPPORTED: Final = "FieldValueNotSupported"
TOO_LONG: Final = "FieldValueTooLong"
TOO_MANY: Final = "FieldValueTooMany"
DUPLICATE: Final = "FieldValueDuplicate"
NOWHERE: Final = "<nil>"

_NOT_CHECKED = (
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
_HINDERS_RULES = frozenset({REQUIRED, TYPE_INVALID, NOT_SUPPORTED, TOO_LONG, TOO_MANY})
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{_NAME}')"
)
_MAX_NAME_LENGTH = 253
_RANGES = {"int32": 31, "int64": 63}
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[tT]([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", re.ASCII
)
_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean"})
_VALIDATIONS = "x-kubernetes-validations"
_LIST_TYPE, _LIST_KEYS = "x-kubernetes-list-type", "x-kubernetes-list-map-keys"
_SHAPE = {"type", "properties", "additionalProperties", "required", "items", "nullable"}
_LIMITS = {f"{side}{what}" for side in ("min", "max") for what in ("Length", "Items", "Properties")}
_KEYWORDS = frozenset(
    {"description", "default", "enum", "format", "pattern", "minimum", "maximum"}
    | {_VALIDATIONS, _LIST_TYPE, _LIST_KEYS, "x-kubernetes-map-type"}
    | _SHAPE
    | _LIMITS
)


@dataclass(frozen=True, slots=True)
class FieldError:
    """A cause of a 422: the path (`spec.targetPorts[0].number`), the reason, and the message."""

    path: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class CrdRules:
    """The rules of one version of a definition. Raises ValueError if it is not structural."""

    def __init__(self, document: dict[str, Any], version: str | None = None) -> None:
        versions = {one["name"]: one for one in document["spec"]["versions"]}
        self.document = document
        self.version: dict[str, Any] = versions[version or next(iter(versions))]
        self.schema: Schema = self.version["schema"]["openAPIV3Schema"]
        problems = list(_not_structural(self.schema, ()))
        if problems:
            raise ValueError("; ".join(problems))
        self._validator = _Validator(self.schema)

    @classmethod
    def load(cls, path: Path, version: str | None = None) -> CrdRules:
        return cls(yaml.safe_load(path.read_text()), version)

    def prune(self, obj: dict[str, Any]) -> list[str]:
        return [_dotted(place) for place in _prune(obj, self.schema, ())]

    def apply_defaults(self, obj: dict[str, Any]) -> None:
        _fill(obj, self.schema)

    def errors(self, obj: dict[str, Any]) -> list[FieldError]:
        found = {*name_errors(obj), *_duplicates(obj, self.schema, ())}
        for error in self._validator.iter_errors(obj):
            found.update(_errors_of(error))
        errors = sorted(found, key=lambda one: (one.path == NOWHERE, one.path, one.message))
        if any(one.reason in _HINDERS_RULES for one in errors):
            return [*errors, FieldError(NOWHERE, INVALID, _NOT_CHECKED)]
        return errors + list(_broken_rules(obj, self.schema, ()))

    def admit(self, obj: dict[str, Any]) -> tuple[dict[str, Any], list[FieldError]]:
        """Return the object that would be stored for `obj` (left unchanged), and its errors."""
        stored = copy.deepcopy(obj)
        self.prune(stored)
        self.apply_defaults(stored)
        return stored, self.errors(stored)


def _dotted(place: Place) -> str:
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)
    return text.removeprefix(".")


def _children(value: Any, schema: Schema, at: Place) -> Iterator[tuple[Any, Schema, Place]]:
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for key, one in value.items():
            below = properties.get(key, rest)
            if isinstance(below, dict):
                yield one, below, (*at, key)
    elif isinstance(value, list) and "items" in schema:
        for index, one in enumerate(value):
            yield one, schema["items"], (*at, index)


def _prune(value: Any, schema: Schema, at: Place) -> Iterator[Place]:
    if isinstance(value, dict) and "additionalProperties" not in schema:
        known = set(schema.get("properties", {})) | ({"apiVersion", "kind"} if not at else set())
        if at != ("metadata",):
            for key in [key for key in value if key not in known and (at or key != "metadata")]:
                del value[key]
                yield (*at, key)
    for one, below, place in list(_children(value, schema, at)):
        yield from _prune(one, below, place)


def _fill(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for one, below, place in list(_children(value, schema, ())):
            if one is None and not below.get("nullable"):
                del value[place[-1]]
        for key, below in schema.get("properties", {}).items():
            if key not in value and "default" in below:
                value[key] = copy.deepcopy(below["default"])
    for one, below, _ in _children(value, schema, ()):
        _fill(one, below)


def name_errors(obj: dict[str, Any]) -> Iterator[FieldError]:
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        text = "Required value: name or generateName is required"
        yield FieldError("metadata.name", REQUIRED, text)
    elif len(name) > _MAX_NAME_LENGTH:
        text = f"Invalid value: {json.dumps(name)}: must be no more than 253 bytes"
        yield FieldError("metadata.name", INVALID, text)
    elif not re.fullmatch(_NAME, name):
        text = f"Invalid value: {json.dumps(name)}: {_NAME_RULE}"
        yield FieldError("metadata.name", INVALID, text)


def _duplicates(value: Any, schema: Schema, at: Place) -> Iterator[FieldError]:
    if isinstance(value, list) and schema.get(_LIST_TYPE) in ("map", "set"):
        names = schema.get(_LIST_KEYS)
        seen = set()
        for index, one in enumerate(value):
            if names is not None and not isinstance(one, dict):
                continue
            key = json.dumps({name: one.get(name) for name in names} if names else one)
            if key in seen:
                text = f"Duplicate value: {key.replace(': ', ':')}"
                yield FieldError(_dotted((*at, index)), DUPLICATE, text)
            seen.add(key)
    for one, below, place in _children(value, schema, at):
        yield from _duplicates(one, below, place)


def _broken_rules(value: Any, schema: Schema, at: Place) -> Iterator[FieldError]:
    for rule in schema.get(_VALIDATIONS, ()):
        if not _holds(rule["rule"], value):
            message = rule.get("message", f"failed rule: {rule['rule']}")
            yield FieldError(_dotted(at), rule.get("reason", INVALID), f"Invalid value: {message}")
    for one, below, place in _children(value, schema, at):
        yield from _broken_rules(one, below, place)


def _holds(rule: str, value: Any) -> bool:
    held = _program(rule).execute({"self": value})
    if not isinstance(held, bool):
        raise TypeError(f"the rule {rule!r} gives {held!r}")
    return held


@cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


@cache
def _as_python(pattern: str) -> re.Pattern[str]:
    """Return a pattern of Go for Python: its "$" is the end of the text, its classes are ASCII."""
    pieces = r"\\.|\[(?:\\.|[^\]\\])*\]|\$"
    text = re.sub(pieces, lambda one: r"\Z" if one[0] == "$" else one[0], pattern)
    return re.compile(text, re.ASCII)


def _check_pattern(_: Any, pattern: str, value: Any, __: Schema) -> Iterator[Any]:
    if isinstance(value, str) and not _as_python(pattern).search(value):
        yield jsonschema.ValidationError("pattern")


def _check_format(_: Any, name: str, value: Any, __: Schema) -> Iterator[Any]:
    if name in _RANGES and isinstance(value, int | float) and not isinstance(value, bool):
        limit = 2 ** _RANGES[name]
        if not -limit <= value < limit:
            yield jsonschema.ValidationError("format")
    elif name == "date-time" and isinstance(value, str) and not _is_time(value):
        yield jsonschema.ValidationError("format")


def _is_time(text: str) -> bool:
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    try:
        date.fromisoformat(found[1])
    except ValueError:
        return False
    return True


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _check_pattern, "format": _check_format}
)


def _errors_of(error: jsonschema.ValidationError) -> Iterator[FieldError]:
    keyword, limit, value = error.validator, error.validator_value, error.instance
    place = tuple(error.absolute_path)
    path = _dotted(place)
    if keyword == "required":
        for name in limit:
            if name not in value:
                yield FieldError(_dotted((*place, name)), REQUIRED, "Required value")
    elif keyword == "format" and limit in _RANGES:
        text = f'Invalid value: "": Checked value must be of type integer with format {limit}'
        yield FieldError(NOWHERE, TYPE_INVALID, text)
    elif keyword == "type":
        kind = _kind(value)
        text = f'Invalid value: "{kind}": {path} in body must be of type {limit}: "{kind}"'
        yield FieldError(path, TYPE_INVALID, text)
    elif keyword == "enum":
        values = ", ".join(map(json.dumps, limit))
        text = f"Unsupported value: {json.dumps(value)}: supported values: {values}"
        yield FieldError(path, NOT_SUPPORTED, text)
    elif keyword == "maxLength":
        yield FieldError(path, TOO_LONG, f"Too long: may not be more than {limit} bytes")
    elif keyword in ("maxItems", "maxProperties"):
        text = f"Too many: {len(value)}: must have at most {limit} items"
        yield FieldError(path, TOO_MANY, text)
    else:
        shown = len(value) if isinstance(value, list | dict) else json.dumps(value)
        text = f"Invalid value: {shown}: {path} in body {_demand(str(keyword), limit)}"
        yield FieldError(path, INVALID, text)


def _demand(keyword: str, limit: Any) -> str:
    return {
        "minProperties": f"should have at least {limit} properties",
        "minItems": f"should have at least {limit} items",
        "minLength": f"should be at least {limit} chars long",
        "pattern": f"should match '{limit}'",
        "format": f"must be of type {limit}",
        "minimum": f"should be greater than or equal to {limit}",
        "maximum": f"should be less than or equal to {limit}",
    }[keyword]


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
    kinds |= {dict: "object", list: "array", type(None): "null"}
    return kinds[type(value)]


def _not_structural(schema: Schema, at: Place) -> Iterator[str]:
    here = _dotted(at) or "the schema"
    yield from (f"{here} {text}" for text in _bad_node(schema))
    if schema.get(_LIST_TYPE) == "map":
        yield from (f"{here} {text}" for text in _bad_keys(schema))
    for rule in schema.get(_VALIDATIONS, ()):
        _program(rule["rule"])
    below = {(*at, name): one for name, one in schema.get("properties", {}).items()}
    below |= {(*at, one): schema[one] for one in ("items", "additionalProperties") if one in schema}
    for place, one in below.items():
        yield from _not_structural(one, place)


def _bad_node(schema: Schema) -> Iterator[str]:
    if schema.get("type") not in _TYPES:
        yield "has no type"
    if unknown := schema.keys() - _KEYWORDS:
        yield f"has unknown keywords: {sorted(unknown)}"
    if "properties" in schema and "additionalProperties" in schema:
        yield "has both properties and additionalProperties"
    if missing := set(schema.get("required", ())) - schema.get("properties", {}).keys():
        yield f"requires unknown properties: {sorted(missing)}"
    if schema.get("type") == "array" and "items" not in schema:
        yield "has no items"
    if "default" in schema and any(_Validator(schema).iter_errors(schema["default"])):
        yield "has a default that it does not allow"


def _bad_keys(schema: Schema) -> Iterator[str]:
    items = schema.get("items", {})
    properties, required = items.get("properties", {}), items.get("required", ())
    keys = schema.get(_LIST_KEYS, ())
    if not keys:
        yield "is a map without keys"
    for key in keys:
        if key not in required and "default" not in properties.get(key, {}):
            yield f"has the key '{key}', which items may leave out"
