"""A JSON value and a struct type → the value as an API server would store it, and its problems.

An API server returns objects that break its current schema: they were stored under an older one. So
everything is checked again, by the structs that objects are read into. All problems are found, and
those of the whole object are reported at once; msgspec's own conversion stops at the first one.

The check follows the type, never the value, so the depth of a value does not matter.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import inspect

Place: TypeAlias = tuple[str | int, ...]

_SHOWN_LENGTH = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectProblem:
    """One problem of an object. An object with an error is not followed; a warning is only logged.

    `path` is that of the field (`spec.targetPorts[0].number`), `value` its value, as JSON and cut
    when it is long, None where there is none; `fix` is what to do about it.
    """

    is_error: bool
    path: str
    value: str | None
    message: str
    fix: str

    def __str__(self) -> str:
        """`path: message, got value: fix`, in one printable line."""
        got = "" if self.value is None else f", got {self.value}"
        return f"{self.path or 'the object'}: {self.message}{got}: {self.fix}"


class _Absent(Enum):
    """In place of a value where there is none; None is JSON's null."""

    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT


def error(place: Place, value: Any, message: str, fix: str) -> ObjectProblem:
    """A reason not to follow an object; `value` is shown, `ABSENT` is not."""
    return ObjectProblem(True, dotted(place), _shown(value), message, fix)


def warning(place: Place, value: Any, message: str, fix: str) -> ObjectProblem:
    """Something that its author hardly meant."""
    return ObjectProblem(False, dotted(place), _shown(value), message, fix)


def dotted(place: Place) -> str:
    """`spec.targetPorts[0]`; keys that are no words are in brackets."""
    return "".join(_step(one) for one in place).removeprefix(".")


def _step(one: str | int) -> str:
    if isinstance(one, int):
        return f"[{one}]"
    return f".{one}" if _PLAIN_KEY.fullmatch(one) else f"[{_shown(one)}]"


def _shown(value: Any) -> str | None:
    if value is ABSENT:
        return None
    if isinstance(value, dict | list):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if isinstance(value, str) and len(value) > _SHOWN_LENGTH:
        value = f"{value[:_SHOWN_LENGTH]}…"
    text = json.dumps(value, ensure_ascii=False, default=lambda one: type(one).__name__)
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


# What is expected of each kind of types: how a problem names it, and which values are of it.
_EXPECTED: Final[dict[type[inspect.Type], tuple[str, Any]]] = {
    inspect.StructType: ("a mapping", dict),
    inspect.DictType: ("a mapping", dict),
    inspect.VarTupleType: ("a list", list),
    inspect.StrType: ("a text", str),
    inspect.LiteralType: ("a text", str),
    inspect.IntType: ("a whole number", int),
}


def stored(value: Any, shape: type[msgspec.Struct], at: Place, found: list[ObjectProblem]) -> Any:
    """A copy of `value`, which is to be a `shape`, without unknown keys and nulls; it converts to
    one unless an error was added to `found`. Defaults are left to the conversion.
    """
    return _stored(value, _type_of(shape), at, found)


def _stored(value: Any, kind: inspect.Type, at: Place, found: list[ObjectProblem]) -> Any:
    kind, form = _plain(kind)
    if isinstance(kind, inspect.IntType) and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of numbers
    noun, wanted = _EXPECTED[type(kind)]
    if not isinstance(value, wanted) or isinstance(value, bool):
        found.append(error(at, value, f"must be {noun}", f"write {noun}"))
    elif isinstance(kind, inspect.StructType):
        return _stored_struct(value, kind, at, found)
    elif isinstance(kind, inspect.DictType):
        return _stored_mapping(value, kind, at, found)
    elif isinstance(kind, inspect.VarTupleType):
        found.extend(_size_problems(value, kind, at))
        return [_stored(one, kind.item_type, (*at, i), found) for i, one in enumerate(value)]
    else:
        found.extend(_scalar_problems(value, kind, form, at))
    return value


def _stored_struct(
    value: dict[str, Any], kind: inspect.StructType, at: Place, found: list[ObjectProblem]
) -> dict[str, Any]:
    """Nulls count as left out, as they do for an API server; unknown keys become warnings, as they
    may be those of a newer schema.
    """
    fields = {field.encode_name: field for field in kind.fields}
    for key, one in value.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key)[:100], fields, 1)
            fix = f"write '{near[0]}'" if near else "leave it out"
            found.append(warning((*at, str(key)), one, "is unknown and not followed", fix))
    result = {}
    for key, field in fields.items():
        if value.get(key) is not None:
            result[key] = _stored(value[key], field.type, (*at, key), found)
        elif field.required:
            found.append(error((*at, key), ABSENT, "is missing", f"add the key '{key}'"))
    return result


def _stored_mapping(
    value: dict[str, Any], kind: inspect.DictType, at: Place, found: list[ObjectProblem]
) -> dict[str, Any]:
    """In a mapping whose keys are free a null is an error: an API server drops it without a word,
    and a selector then selects more than its author meant.
    """
    for key, one in value.items():
        if one is None:
            text = "has no value, and an API server would drop it without a word"
            found.append(error((*at, str(key)), None, text, "write a value, or leave the key out"))
    rest = {key: one for key, one in value.items() if one is not None}
    found.extend(_size_problems(rest, kind, at))
    for key in rest:
        _stored(str(key), kind.key_type, (*at, str(key)), found)
    return {key: _stored(one, kind.value_type, (*at, str(key)), found) for key, one in rest.items()}


def _size_problems(
    value: dict[str, Any] | list[Any], kind: inspect.DictType | inspect.VarTupleType, at: Place
) -> Iterator[ObjectProblem]:
    least, most = kind.min_length, kind.max_length
    if least is not None and len(value) < least:
        yield error(at, value, f"must have at least {least}", "add what is missing")
    elif most is not None and len(value) > most:
        yield error(at, value, f"must have at most {most}", f"leave no more than {most}")


def _scalar_problems(
    value: Any, kind: inspect.Type, form: str | None, at: Place
) -> Iterator[ObjectProblem]:
    """Problems of a text or a number; `form` says in words what the pattern of a text allows."""
    if isinstance(kind, inspect.LiteralType) and value not in kind.values:
        allowed = ", ".join(map(str, kind.values))
        yield error(at, value, "is not a known value", f"write one of: {allowed}")
    elif isinstance(kind, inspect.IntType):
        low, high = kind.ge, kind.le
        if low is not None and high is not None and not low <= value <= high:
            text = f"is not between {low} and {high}"
            yield error(at, value, text, f"write a number from {low} to {high}")
    elif isinstance(kind, inspect.StrType):
        longest, pattern = kind.max_length, kind.pattern
        if longest is not None and len(value) > longest:
            text = f"has {len(value)} characters, more than {longest}"
            yield error(at, value, text, f"write at most {longest} characters")
        elif len(value) < (kind.min_length or 0):
            yield error(at, value, "must not be empty", "write a value")
        elif pattern is not None and not re.search(pattern, value):
            yield error(at, value, "is malformed", f"write {form or 'what matches ' + pattern}")


@cache
def _type_of(shape: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(shape)


def _plain(kind: inspect.Type) -> tuple[inspect.Type, str | None]:
    """A type without `| None` and its description, and the description."""
    form = None
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            form = (kind.extra_json_schema or {}).get("description", form)
            kind = kind.type
        else:
            kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind, form
