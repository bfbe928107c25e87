r"""JSON Schemas rewritten so that the grammar library enforces them completely. Pure.

The library accepts some schemas without enforcing them; this module refuses or rewrites these:

- The library counts a repeated name twice, so `minProperties` holds only if all names are known.
- A `$ref` that leads back to itself in every alternative has no finite answer.
- The library's dates may be 30 February, and its times may have a second 60 at any time of day.
- A name spelled with `\u` escapes matches none of the `properties`, so no string may have such an
escape. Control characters that have no other escape can then not be drawn.
- White space between two tokens is unlimited, and models may write nothing else.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

# Keywords whose values map names to schemas, and those whose values are data.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_OPTIONS = "x-guidance"
_DEFAULTS = {
    "json_allowed_escapes": 'nrbtf\\"',
    # A blank, or up to two ends of lines and an indentation: room for any layout, and a bound for
    # models that would write white space for ever.
    "whitespace_pattern": r"[ \t]?(?:(?:\r?\n){1,2}[ \t]{0,40})?",
}
# Keywords that the library does not know, with values, as JSON, that demand nothing.
_IDLE = {
    "uniqueItems": ("false",),
    "unevaluatedItems": ("true", "{}"),
    "unevaluatedProperties": ("true", "{}"),
    "propertyNames": ("true", "{}", '{"type":"string"}'),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
    "dependencies": ("{}",),
    "not": ("false",),
}
# Others, which demand nothing without one of these beside them.
_COMPANIONS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
# The standard's formats; a name that is none of them is an annotation (2020-12, 7.2.3).
_STANDARD_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)

# A regular expression consists of characters and escapes.
_ESCAPE = r"\\(?:[xuU]\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuUpPbB])"
_SYMBOL = re.compile(rf"(?s:{_ESCAPE}|\\.|.)")
# Control characters without an escape of one letter, and how regular expressions may spell them.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_SYMBOL = re.compile(
    rf"(?s:{_CONTROL.pattern})|\\[av]|\\[xuU]\{{?0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}}?"
)
# What classes let in is of ASCII, as in ECMA-262; what they keep out is Unicode's, as in Python and
# Rust, so that an answer matches in every reader of the expression.
_WORD = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}"
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t-\r\x20"}
_WIDE = {"d": r"\p{Nd}", "w": _WORD, "s": r"\s\x{FEFF}"}

# Of a negative look-ahead: what matches one character, and how often.
_UNIT = re.compile(
    rf"(?s:(\[\^?(?:{_ESCAPE}|[^\\\]\[])+\]|{_ESCAPE}|[^\\^$|?*+()\[\]{{}}])([*+]?))"
)
_MAX_LOOK_AHEADS, _MAX_UNITS = 16, 32  # a schema's author has few, an attacker has many
# In the patterns of pydantic's `Decimal`: digits with or without a point, up to a number.
_DECIMALS = re.compile(
    r"(\\d\{0,\d+\})\|\(\?=\[\\d\.\]\{1,(\d{1,3})\}0\*\$\)"
    r"\\d(?:\*|\{0,(\d+)\})\\\.\\d(?:\*|\{0,(\d+)\})0\*\$"
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
    """Return the schema that the library enforces. Raises `ValueError` if there is none."""
    _check(schema)
    loop = _References(schema).endless()
    if loop is not None:
        raise ValueError(f"`$ref` {loop!r} leads back to itself, so no answer would end")
    return {**_rewritten(schema), _OPTIONS: {**_DEFAULTS, **(options or {})}}


def _parts(schema: dict[str, Any]) -> Iterator[object]:
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
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else value.values():
            yield from _strings(item)


def _has_control(pattern: str) -> bool:
    """Return whether a pattern has a control character; the ends of a range do not count."""
    symbols = _SYMBOL.findall(pattern)
    depth = 0
    for place, symbol in enumerate(symbols):
        depth = max(0, depth + (symbol == "[") - (symbol == "]"))
        around = (symbols[place - 1 : place], symbols[place + 1 : place + 2])
        if _CONTROL_SYMBOL.fullmatch(symbol) and not (depth and ["-"] in around):
            return True
    return False


def _rewritten(schema: Any) -> Any:
    """Write formats as patterns, and patterns in the library's syntax."""
    if isinstance(schema, list):
        return [_rewritten(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if _is_idle(name, value, schema):
            continue
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: _rewritten(item) for key, item in value.items()}
        else:
            found[name] = value if name in _DATA else _rewritten(value)
    named = found.get("patternProperties")
    if isinstance(named, dict):
        found["patternProperties"] = {ascii_classes(key): item for key, item in named.items()}
        if len(found["patternProperties"]) < len(named):
            raise ValueError("`patternProperties` has two patterns that mean the same")
    form, pattern, besides = found.get("format"), found.get("pattern"), found.get("allOf", [])
    patterns: list[str] = [_FORMATS[form]] if isinstance(form, str) and form in _FORMATS else []
    if isinstance(pattern, str):
        found["pattern"], *others = map(ascii_classes, _without_look_ahead(pattern))
        patterns += others
    if patterns and isinstance(besides, list):
        found["allOf"] = [*besides, *({"pattern": text} for text in patterns)]
    return found


def _is_idle(name: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a keyword demands nothing, so that it may be left out."""
    if name == "format":
        return isinstance(value, str) and value not in _STANDARD_FORMATS
    if name in _COMPANIONS:
        return schema.keys().isdisjoint(_COMPANIONS[name])
    return name in _IDLE and msgspec.json.encode(value).decode() in _IDLE[name]


def ascii_classes(pattern: str) -> str:
    excluded = [False]  # within each open bracket
    found: list[str] = []
    for symbol, following in pairwise([*_SYMBOL.findall(pattern), ""]):
        if symbol == "[":
            excluded.append(excluded[-1] != (following == "^"))
        elif symbol == "]" and len(excluded) > 1:
            excluded.pop()
        kind = symbol[1:].lower()
        if symbol[0] == "\\" and kind in _NARROW:
            is_negated = symbol[1:].isupper()
            members = (_WIDE if is_negated != excluded[-1] else _NARROW)[kind]
            symbol = f"[^{members}]" if is_negated else f"[{members}]"
        found.append(symbol)
    return "".join(found)


def _without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that together match only where `pattern` does; each look-ahead with which it
    begins is one of them. If that is not possible, return the pattern itself, which the library
    refuses.
    """
    rest = _SYMBOL.findall(_DECIMALS.sub(_decimals, pattern, count=1))
    rest = rest[rest[:1] == ["^"] :]
    found: list[str] = []
    while rest[:3] in (["(", "?", "="], ["(", "?", "!"]):
        end = _end_of_group(rest)
        if end is None or len(found) == _MAX_LOOK_AHEADS:
            return [pattern]
        body = "".join(rest[3:end]).removeprefix("^")
        ahead = f"^(?:{body})" if rest[2] == "=" else _never(body)
        if ahead is None:
            return [pattern]
        found.append(ahead)
        rest = rest[end + 1 :]
    return [*found, f"^(?:{''.join(rest)})"] if found else [pattern]


def _end_of_group(symbols: list[str]) -> int | None:
    depth = 0
    in_class = False
    for place, symbol in enumerate(symbols):
        in_class = symbol != "]" if in_class else symbol == "["
        depth += 0 if in_class else (symbol == "(") - (symbol == ")")
        if not depth:
            return place
    return None


def _never(body: str) -> str | None:
    """Return a pattern of what does not begin with `body`; None if that is too hard to write."""
    is_whole = body.endswith("$")
    body = body.removesuffix("$")
    units = [(match[1], match[2]) for match in _UNIT.finditer(body)]
    if not 0 < len(units) <= _MAX_UNITS or "".join(map("".join, units)) != body:
        return None
    last, times = units[-1]
    other = _other(last)
    if is_whole and times and len(units) == 1:
        return other if times == "*" else f"^$|{other}"
    if units[0] == (".", "*") and not is_whole and {*units[1:]} == {(last, "")}:
        few = f"{last}{{0,{len(units) - 2}}}"  # fewer in a row than the limit
        return f"^(?:{few}{other})*{few}$"
    if any(times for _, times in units):
        return None
    rest = "(?s:.)+" if is_whole else None
    for unit, _ in reversed(units):
        more = "" if rest is None else f"|{unit}{rest}"
        rest = f"(?:{_other(unit)}(?s:.)*{more})?"
    return f"^{rest}$"


def _other(unit: str) -> str:
    if unit == ".":
        return r"\n"
    inner = unit[1:-1] if unit[0] == "[" else unit
    return f"[{inner[1:]}]" if inner[0] == "^" else f"[^{inner}]"


def _decimals(match: re.Match[str]) -> str:
    """Return a pattern of the same digits, to the end, without the look-ahead that counts them."""
    whole, limit, before, behind = match.groups()
    most = int(limit) - 1
    places = range(min(most, int(before or most)) + 1)
    parts = (rf"\d{{{n}}}\.\d{{0,{min(most - n, int(behind or most))}}}0*$" for n in places)
    return "|".join((f"{whole}$", *parts))


class _References:
    """The references among a schema's parts, and the parts that no finite answer matches."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._places: dict[str, dict[str, Any]] = {"": schema}
        self._bases: dict[int, str] = {}  # of each part, by its identity
        self._parts: list[dict[str, Any]] = []
        self._enter(schema, "")

    def endless(self) -> str | None:
        missing: dict[int, int] = {}  # of each part, how much of what it requires
        choices: list[dict[str, Any]] = []  # the part that each choice is of
        waiting: dict[int, list[int]] = {}  # choices that the end of a part makes
        for part in self._parts:
            needs = [
                ways for ways in self._needs(part) if all(id(way) in self._bases for way in ways)
            ]
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

    def _target(self, reference: str, base: str) -> object:
        """Return the schema that a reference names; None if it is not within this schema."""
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
