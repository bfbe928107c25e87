"""Plain values → typed ones: structs, strictly and with all errors at once; durations and
quantities.

msgspec decides what is valid. Only a refused value is walked, field by field, for all errors and
for the valid parts, so that the rest of the configuration is checked as well. In these parts a
missing or invalid required text is "", which no valid configuration contains.
"""

import math
import re
from decimal import Decimal
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from base.durations import parse_duration
from picker.config.findings import Findings, Path, nearest_name
from picker.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

# The parts of msgspec's messages: its errors have a text and no attributes.
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_KINDS = {"object": "a mapping", "array": "a list", "str": "a string", "int": "a whole number"}
_KINDS |= {"float": "a number", "bool": "true or false", "null": "nothing"}
_QUANTITY = re.compile(
    r"\+?(\d+\.?\d*|\.\d+)(?:([num]|[kMGTPE]|[KMGTPE]i)|[eE]([-+]?\d{1,3}))?B?", re.ASCII
)
_UNITS = {name: Decimal(1000) ** power for power, name in enumerate("num kMGTPE", -3)}
_UNITS |= {f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)}
MAX_BYTES = 2**63 - 1  # the range of Kubernetes's quantities


class _Absent(Enum):
    ABSENT = "absent"


_ABSENT = _Absent.ABSENT


def decode(
    value: Any, shape: type[S], at: Path, findings: Findings, *, allow_unknown: bool = False
) -> S | None:
    """Decode `value` at path `at` as a `shape`; return None after errors, which go into `findings`.
    A known key without a value counts as absent. With `allow_unknown` an unknown key is dropped
    with a warning: it may be one of a newer schema.
    """
    unknown: dict[Path, str] = {}
    written = _written(value, shape, at, unknown if allow_unknown else None)
    converted = _converted(written, shape, at, findings)
    for path, text in unknown.items():
        findings.warn(path, text)
    return converted


def decode_most(value: Any, shape: type[S], at: Path, findings: Findings) -> S:
    """Decode as `decode` does, but omit or empty only the invalid parts."""
    before, value = len(findings), _written(value, shape, at, None)
    decoded = _converted(value, shape, at, findings)
    if decoded is not None:
        return decoded
    valid = _walk(value, shape, at, findings) if len(findings) > before else _ABSENT
    empty: S = _hole(shape)
    return valid if isinstance(valid, shape) else empty


def _written(value: Any, annotation: Any, at: Path, unknown: dict[Path, str] | None) -> Any:
    """Return `value` without keys that have no value; move the keys no struct has to `unknown`."""
    shape, _ = _required(annotation)
    if get_origin(shape) is Annotated:
        shape = get_args(shape)[0]
    if isinstance(value, list) and get_origin(shape) is tuple:
        item = get_args(shape)[0]
        return [_written(one, item, (*at, i), unknown) for i, one in enumerate(value)]
    if not (isinstance(value, dict) and isinstance(shape, type)):
        return value
    if not issubclass(shape, msgspec.Struct):
        return value
    kinds, written = {field.encode_name: field.type for field in _fields(shape)}, {}
    for key, one in value.items():
        if key not in kinds and unknown is not None:
            nearest = nearest_name(key, tuple(kinds))
            meant = "" if nearest is None else f"; did you mean '{nearest}'?"
            unknown[*at, str(key)] = f"unknown key, which is ignored{meant}"
        elif one is not None or key not in kinds:
            written[key] = _written(one, kinds.get(key, Any), (*at, key), unknown)
    return written


def _converted(value: Any, shape: type[S], at: Path, findings: Findings) -> S | None:
    before = len(findings)
    # msgspec stops at the first error, so only after one is the value walked for all of them.
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        _walk(value, shape, at, findings)
        if len(findings) == before:  # a rule of the struct as a whole
            _report(str(error), shape, at, findings)
    except RecursionError:
        findings.error(at, "is nested too deeply")
    return None


def _walk(value: Any, annotation: Any, at: Path, findings: Findings) -> Any:
    shape, is_optional = _required(annotation)
    if value is None and is_optional:
        return None
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        return _walk_struct(value, shape, at, findings)
    if get_origin(shape) is tuple and get_args(shape)[-1:] == (...,):
        return _walk_list(value, get_args(shape)[0], at, findings)
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        if limits := _limits_missed(value, shape):
            findings.error(at, f"expected {limits}, got {value}")
        else:
            _report(str(error), shape, at, findings)
    except RecursionError:
        findings.error(at, "is nested too deeply")
    return _ABSENT


def _walk_struct(value: Any, shape: type[msgspec.Struct], at: Path, findings: Findings) -> Any:
    if not isinstance(value, dict):
        findings.error(at, f"expected a mapping, got {_kind(value)}")
        return _ABSENT
    fields = {field.encode_name: field for field in _fields(shape)}
    # The value of a misspelt key is that of the nearest key: one error, without the errors that
    # would follow from a missing key.
    written = {key: key for key in value if key in fields}
    for key in value:
        if key not in fields:
            _report_unknown((*at, str(key)), key, tuple(fields), findings)
            meant = nearest_name(key, tuple(fields))
            if value[key] is not None and meant is not None and meant not in written:
                written[meant] = key
                findings.take_as((*at, str(key)), (*at, meant))
    valid: dict[str, Any] = {}
    for key, field in fields.items():
        if key in written:
            part = _walk(value[written[key]], field.type, (*at, str(written[key])), findings)
            if part is not _ABSENT:
                valid[field.name] = part
                continue
        elif field.required:
            findings.error(at, f"the key '{key}' is missing")
        if field.required:
            valid[field.name] = ""
    try:
        return shape(**valid)
    except (TypeError, ValueError):  # a rule of the struct, broken by the holes
        return _hole(shape)


def _walk_list(value: Any, element: Any, at: Path, findings: Findings) -> Any:
    """Walk the elements; invalid ones leave holes, so that indexes remain right."""
    if not isinstance(value, list | tuple):
        findings.error(at, f"expected a list, got {_kind(value)}")
        return _ABSENT
    shape, _ = _required(element)
    hole = _hole(shape) if isinstance(shape, type) and issubclass(shape, msgspec.Struct) else ""
    parts = (_walk(one, element, (*at, index), findings) for index, one in enumerate(value))
    return tuple(hole if part is _ABSENT else part for part in parts)


def _hole(shape: type[msgspec.Struct]) -> Any:
    """Return a struct of defaults, with "" for required fields."""
    required = {field.name: "" for field in _fields(shape) if field.required}
    return shape(**required)


@cache
def _fields(shape: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields from a cache: msgspec derives them from the annotations each time."""
    return msgspec.structs.fields(shape)


def _required(annotation: Any) -> tuple[Any, bool]:
    """Return the annotation without `| None`, and whether it had one."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    parts = [part for part in get_args(annotation) if part is not NoneType]
    is_optional = len(parts) < len(get_args(annotation))
    return (parts[0] if len(parts) == 1 else annotation), is_optional


def _report(message: str, shape: Any, at: Path, findings: Findings) -> None:
    match = _AT.match(message)
    what, tail = (match["what"], match["path"] or "") if match else (message, "")
    tail = tail.partition("[...]")[0]  # somewhere in a mapping: msgspec does not say where
    inner = tuple(name or int(index) for name, index in _STEP.findall(tail))
    path = (*at, *inner)
    if unknown := _UNKNOWN.fullmatch(what):
        _report_unknown((*path, unknown[1]), unknown[1], (), findings)
    elif missing := _MISSING.fullmatch(what):
        findings.error(path, f"the key '{missing[1]}' is missing")
    else:
        allowed = () if inner else _values(shape)
        findings.error(path, _in_yaml_words(what), allowed)


def _limits_missed(value: Any, annotation: Any) -> str:
    """Return the limits that a number violates, described in words; "" for other errors."""
    if get_origin(annotation) is not Annotated or isinstance(value, bool):
        return ""
    kind, *limits = get_args(annotation)
    if not isinstance(value, int | float) or kind not in (int, float):
        return ""
    # Integers beyond 64 bits have become floats on the way here.
    if kind is int and isinstance(value, float) and abs(value) < 2**63:
        return ""
    numbers = next((one for one in limits if isinstance(one, msgspec.Meta)), msgspec.Meta())
    if None not in (numbers.ge, numbers.le):
        return f"{_KINDS[kind.__name__]} from {numbers.ge} to {numbers.le}"
    words = (("at least", numbers.ge), ("above", numbers.gt), ("at most", numbers.le))
    parts = [
        f"{word} {limit}" for word, limit in (*words, ("below", numbers.lt)) if limit is not None
    ]
    return f"{_KINDS[kind.__name__]} {' and '.join(parts)}" if parts else ""


def _report_unknown(path: Path, key: object, allowed: tuple[str, ...], findings: Findings) -> None:
    if allowed:
        findings.unknown(path, "unknown key", key, allowed)
    else:
        findings.error(path, "unknown key, none is allowed")


def _values(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(member.value) for member in annotation)
    return ()


def _kind(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = ((bool, "bool"), (int, "int"), (float, "float"))
    kinds += ((str, "str"), (dict, "object"), (list, "array"), (NoneType, "null"))
    name = next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)
    return _KINDS.get(name, name)


def _in_yaml_words(what: str) -> str:
    """Translate msgspec's "Expected `str`, got `int`" into the words of YAML."""

    def word(match: re.Match[str]) -> str:
        kinds = [kind.strip() for kind in match[1].split("|")]
        # "or nothing" would only confuse: an optional key can just be left out.
        if len(kinds) > 1 and "null" in kinds:
            kinds.remove("null")
        return " or ".join(_KINDS.get(kind, kind) for kind in kinds)

    text = re.sub(r"`([^`]*)`", word, what)
    if text == "Expected a string of length >= 1":
        return "must not be empty"
    return text[:1].lower() + text[1:]


def duration_seconds(text: str) -> float:
    """Parse a Go duration, e.g. `50ms`, `1m30s`, `0`. Raises `ConfigError`, also if negative."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def quantity_bytes(text: str) -> int:
    """Parse a quantity, e.g. `4194304`, `4Mi`, `10MiB`, `25MB`, `1e6`. Raises `ConfigError`."""
    match = _QUANTITY.fullmatch(text)
    if match is not None:
        number, unit, exponent = match.groups()
        size = Decimal(number) * _UNITS[unit or " "] * Decimal(10) ** int(exponent or 0)
        # Kubernetes rounds up, too.
        if size <= MAX_BYTES:
            return math.ceil(size)
    raise ConfigError(f"'{text}' is no size; write for example 4194304, 4Mi or 10MiB")
