"""A value and its schema → the value as an API server would store it, and what is wrong with it.

`settled` leaves out what the schema does not know and fills in defaults; `problems` tells which
limits and rules the result breaks. Both follow the schema, never the value, so that a value may be
nested as deeply as anybody likes.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

from picker.k8s.objects.findings import ABSENT, ObjectFinding, Place, error, warning
from picker.k8s.objects.pool import LabelValue
from picker.k8s.objects.rules import RULES
from picker.k8s.objects.schema import Schema, schema_of
from picker.pool.object_parts import END, GroupName, KindName

_NOUNS: Final = {
    "object": "a mapping",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "boolean": "true or false",
}
_PLAIN: Final = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_PATTERN_FIXES: Final = {
    schema_of(LabelValue)["pattern"]: "write letters, digits, '-', '_' and '.' that begin and end "
    "with a letter or digit",
    schema_of(GroupName)["pattern"]: "write a DNS name in lower case, or nothing",
    schema_of(KindName)["pattern"]: "write letters, digits and '-', with a letter first",
}


def settled(value: Any, schema: Schema, at: Place, found: list[ObjectFinding]) -> Any:
    """A copy of `value` with its defaults and without unknown fields, which become warnings.

    Nulls count as left out, as they do for an API server; but in a mapping whose keys are free one
    is an error, for there it takes back something that was said.
    """
    if schema["type"] == "object" and isinstance(value, dict):
        return _settled_object(value, schema, at, found)
    if schema["type"] == "array" and isinstance(value, list):
        items = schema["items"]
        return [settled(one, items, (*at, index), found) for index, one in enumerate(value)]
    if schema["type"] == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)  # JSON has one kind of numbers
    return value


def _settled_object(
    value: dict[Any, Any], schema: Schema, at: Place, found: list[ObjectFinding]
) -> dict[str, Any]:
    if "additionalProperties" in schema:
        found.extend(_nulls(value, at))
        below = schema["additionalProperties"]
        kept = {key: one for key, one in value.items() if one is not None}
        return {key: settled(one, below, (*at, str(key)), found) for key, one in kept.items()}
    properties = schema.get("properties", {})
    found.extend(_unknown(value, properties, at))
    result = {}
    for key, below in properties.items():
        one = value.get(key)
        if one is not None:
            result[key] = settled(one, below, (*at, key), found)
        elif "default" in below:
            result[key] = copy.deepcopy(below["default"])
    return result


def _nulls(value: dict[Any, Any], at: Place) -> Iterator[ObjectFinding]:
    for key, one in value.items():
        if one is None:
            text = "has no value, and an API server would drop it without a word"
            yield error((*at, str(key)), None, text, "write a value, or leave the key out")


def _unknown(value: dict[Any, Any], properties: Schema, at: Place) -> Iterator[ObjectFinding]:
    for key, one in value.items():
        if key not in properties:
            near = difflib.get_close_matches(str(key)[:100], properties, 1)
            fix = f"write '{near[0]}'" if near else "leave it out"
            yield warning((*at, str(key)), one, "is unknown and not followed", fix)


def problems(value: Any, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    """All that is wrong with a settled value. A rule is looked at where the rest is right."""
    kind = schema["type"]
    if not isinstance(value, _PLAIN[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield error(at, value, f"must be {_NOUNS[kind]}", f"write {_NOUNS[kind]}")
        return
    own = [*_own_problems(value, schema, at), *_inner_problems(value, schema, at)]
    yield from own
    if not own:
        yield from _broken_rules(value, schema, at)


def _own_problems(value: Any, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    if isinstance(value, str):
        yield from _text_problems(value, schema, at)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from _number_problems(value, schema, at)
    elif isinstance(value, list):
        yield from _size_problems(value, schema.get("minItems"), schema.get("maxItems"), at)
    elif isinstance(value, dict):
        limits = schema.get("minProperties"), schema.get("maxProperties")
        yield from _size_problems(value, *limits, at)
        for name in schema.get("required", ()):
            if name not in value:
                yield error((*at, name), ABSENT, "is missing", f"add the key '{name}'")


def _inner_problems(value: Any, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from problems(one, schema["items"], (*at, index))
    elif isinstance(value, dict):
        properties, free = schema.get("properties", {}), schema.get("additionalProperties")
        for key, one in value.items():
            yield from problems(one, free or properties[key], (*at, str(key)))


def _text_problems(value: str, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    allowed = schema.get("enum")
    if allowed is not None and value not in allowed:
        yield error(at, value, "is not a known value", f"write one of: {', '.join(allowed)}")
        return
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if longest is not None and len(value) > longest:
        text = f"has {len(value)} characters, more than {longest}"
        yield error(at, value, text, f"write at most {longest} characters")
    elif len(value) < shortest:
        yield error(at, value, "must not be empty", "write a value")
    elif "pattern" in schema and not _pattern(schema["pattern"]).search(value):
        text = f"does not match {schema['pattern']}"
        fix = _PATTERN_FIXES.get(schema["pattern"], "write a value that matches it")
        yield error(at, value, text, fix)


def _number_problems(value: int, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    low, high = limits_of(schema)
    if not low <= value <= high:
        text = f"is not between {low} and {high}"
        yield error(at, value, text, f"write a number from {low} to {high}")


def limits_of(schema: Schema) -> tuple[int, int]:
    """The least and the greatest number that a schema of whole numbers allows."""
    bits = 31 if schema.get("format") == "int32" else 63
    return schema.get("minimum", -(2**bits)), schema.get("maximum", 2**bits - 1)


def _size_problems(
    value: Iterable[Any], least: int | None, most: int | None, at: Place
) -> Iterator[ObjectFinding]:
    size = len(list(value))
    if least is not None and size < least:
        yield error(at, value, f"must have at least {least}", "add what is missing")
    elif most is not None and size > most:
        yield error(at, value, f"must have at most {most}", f"leave no more than {most}")


def _broken_rules(value: Any, schema: Schema, at: Place) -> Iterator[ObjectFinding]:
    for one in schema.get("x-kubernetes-validations", ()):
        rule = RULES[one["rule"]]
        if not rule.holds(value):
            yield error(at, value, rule.message, rule.fix)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """A pattern in an API server's meaning: "$" outside of brackets is the end of the text."""
    pieces = r"\\.|\[(?:\\.|[^\]\\])*\]|\$"
    return re.compile(re.sub(pieces, lambda one: END if one[0] == "$" else one[0], pattern))
