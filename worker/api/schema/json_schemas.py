# Apart: what the grammar library makes of JSON Schema, whatever else a constraint may be.
"""JSON Schemas in the words in which the grammar library enforces all of what they say. Pure.

The library refuses most of what it does not enforce. Refused here, or written in other words, is
what it takes all the same:

- A name may come twice in an object, of which readers keep one: so a least number of names can be
  missed unless each is known.
- A `$ref` that leads back to itself, and does so in each way to go on, has no answer that ends.
- Dates and times of its own may be on 30 February and have a second 60 at any time of day.
- A name may be spelled with `\\u` escapes, and then is none of the `properties`: without these
  escapes each name and each string has one spelling. Control characters that have no other escape
  cannot be drawn then, and the library overlooks them in what it is to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# Keywords whose values map names to schemas, and those whose values are data.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_OPTIONS = "x-guidance"
_SPELLING = {"json_allowed_escapes": 'nrbtf\\"'}

# Control characters without an escape of one letter; in regular expressions also by number. These
# consist of characters and escapes.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_SYMBOL = re.compile(
    rf"(?s:{_CONTROL.pattern})|\\[av]|\\[xuU]\{{?0*(?:0?[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}}?"
)
_SYMBOL = re.compile(
    r"(?s:\\[xuU]\{[0-9a-fA-F]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.)"
)

# Control characters without an escape of one letter, and how regular expressions may spell them.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_SYMBOL = re.compile(
    rf"(?s:{_CONTROL.pattern})|\\[av]|\\[xuU]\{{?0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}}?"
)
_SYMBOL = re.compile(
    r"(?s:\\[xuU]\{[0-9a-fA-F]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.)"
)

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
# Besides what the library looks at. RFC 3339 without leap seconds; RFC 5321, section 4.5.3.1.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": "^[^@]{1,64}@[^@]{1,255}$",
}


def enforceable(schema: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema with nothing in it that the library takes and does not enforce. `options` are the
    library's own. Raises `ValueError` for what cannot be had.
    """
    _check(schema)
    loop = _References(schema).endless()
    if loop is not None:
        raise ValueError(f"`$ref` {loop!r} leads back to itself, so no answer would end")
    return {**_rewritten(schema), _OPTIONS: {**_SPELLING, **(options or {})}}


def _parts(schema: dict[str, Any]) -> Iterator[object]:
    """The schemas in a schema."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif name not in _DATA:
            yield from value if isinstance(value, list) else (value,)


def _check(schema: object) -> None:
    if not isinstance(schema, dict):
        return
    if _OPTIONS in schema:
        raise ValueError(f"`{_OPTIONS}` is not supported; leave it out")
    for name in ("const", "enum"):
        if any(map(_CONTROL.search, _strings(schema.get(name)))):
            raise ValueError(f"`{name}` has a control character")
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str) and _has_control(pattern):
            raise ValueError(f"the pattern {pattern!r} has a control character")
    least = schema.get("minProperties")
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if isinstance(least, int | float) and least > 1 and not is_closed:
        fix = "with `additionalProperties` false and no `patternProperties`"
        raise ValueError(f"`minProperties` above 1 is supported only {fix}")
    for part in _parts(schema):
        _check(part)


def _strings(value: object) -> Iterator[str]:
    """The strings in some data, but for names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            yield from _strings(item)


def _has_control(pattern: str) -> bool:
    """Whether a regular expression has a control character other than as an end of a range."""
    symbols = _SYMBOL.findall(pattern)
    depth = 0
    for place, symbol in enumerate(symbols):
        depth = max(0, depth + (symbol == "[") - (symbol == "]"))
        around = (symbols[place - 1 : place], symbols[place + 1 : place + 2])
        if _CONTROL_SYMBOL.fullmatch(symbol) and not (depth and ["-"] in around):
            return True
    return False


def _rewritten(schema: Any) -> Any:
    """With formats as patterns. `schema` may be a list of schemas, or none."""
    if isinstance(schema, list):
        return [_rewritten(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: _rewritten(item) for key, item in value.items()}
        else:
            found[name] = value if name in _DATA else _rewritten(value)
    form = found.get("format")
    if isinstance(form, str) and form in _FORMATS:
        besides = found.get("allOf", [])
        if isinstance(besides, list):
            found["allOf"] = [*besides, {"pattern": _FORMATS[form]}]
    return found


class _References:
    """Of one schema, where its references lead, and which of its parts have an answer that ends.

    A part has one if all that it requires has, and of alternatives one. What is not about
    references counts as one: whether a schema can be met at all is for the library to say.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._places: dict[str, dict[str, Any]] = {"": schema}
        self._bases: dict[int, str] = {}  # of each part, by its identity
        self._parts: list[dict[str, Any]] = []
        self._enter(schema, "")

    def endless(self) -> str | None:
        """A reference without an answer that ends; None: there is none."""
        missing: dict[int, int] = {}  # of each part, how much of what it requires
        choices: list[dict[str, Any]] = []  # the part that each choice is of
        waiting: dict[int, list[int]] = {}  # choices that the end of a part makes
        for part in self._parts:
            needs = [ways for ways in self._needs(part) if all(map(self._is_known, ways))]
            missing[id(part)] = len(needs)
            for ways in needs:
                for way in ways:
                    waiting.setdefault(id(way), []).append(len(choices))
                choices.append(part)
        ended = [id(part) for part in self._parts if not missing[id(part)]]
        made: set[int] = set()
        for part_id in ended:  # it grows
            for choice in waiting.get(part_id, ()):
                if choice not in made:
                    made.add(choice)
                    owner = id(choices[choice])
                    missing[owner] -= 1
                    if not missing[owner]:
                        ended.append(owner)
        left = (part for part in self._parts if missing[id(part)])
        return next((part["$ref"] for part in left if isinstance(part.get("$ref"), str)), None)

    def _enter(self, schema: object, base: str) -> None:
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$id"), str):
            base = urldefrag(urljoin(base, schema["$id"])).url
            self._places[base] = schema
        if isinstance(schema.get("$anchor"), str):
            self._places[f"{base}#{schema['$anchor']}"] = schema
        self._bases[id(schema)] = base
        self._parts.append(schema)
        for part in _parts(schema):
            self._enter(part, base)

    def _is_known(self, way: object) -> bool:
        return id(way) in self._bases

    def _target(self, reference: str, base: str) -> object:
        """What is referred to; None where that is not in the schema."""
        inside = reference.startswith("#")
        place, fragment = urldefrag(base + reference if inside else urljoin(base, reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._places.get(f"{place}#{fragment}")
        node: Any = self._places.get(place)
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node

    def _needs(self, schema: dict[str, Any]) -> Iterator[list[object]]:
        """What an answer has to have, as the ways to have it."""
        if isinstance(schema.get("$ref"), str):
            yield [self._target(schema["$ref"], self._bases[id(schema)])]
        for part in _list(schema.get("allOf")):
            yield [part]
        for name in ("anyOf", "oneOf"):
            if _list(schema.get(name)):
                yield _list(schema[name])
        named, least = schema.get("properties"), schema.get("minItems")
        if schema.get("type") == "object" and isinstance(named, dict):
            for name in _list(schema.get("required")):
                if isinstance(name, str):
                    yield [named.get(name)]
        if schema.get("type") == "array" and isinstance(least, int | float):
            first = _list(schema.get("prefixItems"))
            for part in first[: int(least)]:
                yield [part]
            if least > len(first):
                yield [schema.get("items")]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
