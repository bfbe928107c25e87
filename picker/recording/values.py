"""Findings ↔ JSON, so that they come back as they were.

Texts, finite floats, whole numbers of 64 bits, true, false and null stand for themselves,
everything else is a list that begins with its kind:

    ["()", …]  ["[]", …]  ["frozenset", …]      sequences
    ["{}", {…}]                                 a mapping with texts as keys
    ["pairs", [key, value], …]                  any other mapping
    ["float", "nan"]  ["int", "…"]  ["bytes", "base64"]
    ["PrefixCacheMatchInfo", field, …]          a type of `KNOWN`, its fields in order
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from picker.framework.attributes import (
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    ServedModel,
    Topology,
)
from picker.prefix.match import PrefixCacheMatchInfo
from picker.recording.lines import Number

_TYPES: tuple[type[Any], ...] = (
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    PrefixCacheMatchInfo,
    ServedModel,
    Topology,
)


def _field_names(kind: type[Any]) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(one.name for one in fields(kind))
    names: tuple[str, ...] = kind.__struct_fields__
    return names


KNOWN: Mapping[str, type[Any]] = MappingProxyType({one.__name__: one for one in _TYPES})
_FIELDS: Mapping[type[Any], tuple[str, ...]] = MappingProxyType(
    {one: _field_names(one) for one in _TYPES}
)
_SEQUENCES: Mapping[str, type[Any]] = MappingProxyType(
    {"()": tuple, "[]": list, "frozenset": frozenset}
)
_KIND_OF_SEQUENCE = MappingProxyType({one: name for name, one in _SEQUENCES.items()})
_OBJECT, _PAIRS, _FLOAT, _INT, _BYTES = "{}", "pairs", "float", "int", "bytes"
_INT_LIMIT = 2**63


class NotReplayableError(TypeError):
    """A value of a type that no recording can hold; the message names the type."""


def recordable(value: Any) -> Any:
    """`value` for JSON. Raises `NotReplayableError`."""
    if value is None:
        return None
    kind = type(value)
    scalar = _SCALARS.get(kind)
    return _composed(value, kind) if scalar is None else scalar(value)


def _composed(value: Any, kind: type[Any]) -> list[Any]:
    names = _FIELDS.get(kind)
    if names is not None:
        return [kind.__name__, *[recordable(getattr(value, name)) for name in names]]
    sequence = _KIND_OF_SEQUENCE.get(kind)
    if sequence is not None:
        return [sequence, *map(recordable, value)]
    if isinstance(value, Mapping):
        return _mapping(value)
    raise NotReplayableError(kind.__name__)


def _text(value: str) -> str:
    return value if value.isascii() else value.encode(errors="replace").decode()


_SCALARS: Mapping[type[Any], Callable[[Any], Any]] = MappingProxyType(
    {
        bool: lambda value: value,
        str: _text,
        int: lambda value: value if -_INT_LIMIT <= value < _INT_LIMIT else [_INT, str(value)],
        float: lambda value: value if math.isfinite(value) else [_FLOAT, str(value)],
        bytes: lambda value: [_BYTES, base64.b64encode(value).decode()],
    }
)


def _mapping(value: Mapping[Any, Any]) -> list[Any]:
    if all(type(key) is str for key in value):
        return [_OBJECT, {recordable(key): recordable(one) for key, one in value.items()}]
    return [_PAIRS, *[[recordable(key), recordable(one)] for key, one in value.items()]]


def restored(value: Any) -> Any:
    """What `recordable` was given; mappings come back as dicts. Raises `ValueError` for what it
    never makes.
    """
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("an object without a kind")
        return value
    if not value or not isinstance(value[0], str):
        raise ValueError("a list without a kind")
    kind, *parts = value
    restore = _RESTORERS.get(kind)
    if restore is None:
        raise ValueError(f"a value of the unknown kind '{kind}'")
    try:
        return restore(parts)
    except (TypeError, LookupError, OverflowError, binascii.Error) as error:
        raise ValueError(f"no value of the kind '{kind}': {error}") from error


def _object(parts: list[Any]) -> dict[str, Any]:
    (only,) = parts
    if not isinstance(only, dict):
        raise ValueError("not an object")
    return {key: restored(one) for key, one in only.items()}


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    found = {}
    for key, one in parts:
        found[restored(key)] = restored(one)
    return found


def _special_float(parts: list[Any]) -> float:
    (text,) = parts
    if text not in ("nan", "inf", "-inf"):
        raise ValueError("no special float")
    return float(text)


def _large_int(parts: list[Any]) -> int:
    (text,) = parts
    return int(text)


def _bytes(parts: list[Any]) -> bytes:
    (text,) = parts
    return base64.b64decode(text, validate=True)


def _sequence(kind: Callable[[Iterable[Any]], Any]) -> Callable[[list[Any]], Any]:
    return lambda parts: kind(map(restored, parts))


def _known(kind: type[Any]) -> Callable[[list[Any]], Any]:
    def restore(parts: list[Any]) -> Any:
        if len(parts) != len(_FIELDS[kind]):
            raise ValueError(f"{len(parts)} fields")
        return kind(*map(restored, parts))

    return restore


_RESTORERS: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {
        _OBJECT: _object,
        _PAIRS: _pairs,
        _FLOAT: _special_float,
        _INT: _large_int,
        _BYTES: _bytes,
        **{name: _sequence(kind) for name, kind in _SEQUENCES.items()},
        **{name: _known(kind) for name, kind in KNOWN.items()},
    }
)


def number(value: float) -> Number:
    """A score as a line holds it."""
    return value if math.isfinite(value) else str(value)
