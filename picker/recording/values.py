"""Findings of producers ↔ JSON that restores them exactly.

Text, finite floats, 64-bit integers, true, false and null represent themselves; everything else is
a list that begins with its kind:

    ["()", …]  ["[]", …]  ["frozenset", …]      sequences
    ["{}", {…}]                                 a mapping with text keys
    ["pairs", [key, value], …]                  any other mapping
    ["float", "nan"]  ["int", "…"]  ["bytes", "base64"]
    ["PrefixCacheMatchInfo", field, …]          a type of `KNOWN`, its fields in order
"""

import base64
import binascii
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from picker.framework.attributes import (
    AGENT_IDENTITY,
    PEER_ENDPOINT,
    SESSION_ID,
    Attributes,
    DataKey,
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    ServedModel,
    Topology,
)
from picker.prefix.match import PrefixCacheMatchInfo
from picker.recording.requests import Digests, readable

# Findings that a producer makes for itself, to know later what it looked up: no decision reads
# them, and a replay makes them again.
OWN_NOTES = frozenset(
    ("BlockHashes", "BlockKeys", "InFlightHold", "LatencyFeatures", "P2pSources", "Span")
)
# Made during the decision itself, so a replay makes them again.
_OF_SCHEDULING = frozenset((PEER_ENDPOINT, "Recorded", "SessionSeen"))
# Ids that may be secrets of clients; decisions only compare them.
_IDENTITIES = frozenset((AGENT_IDENTITY, SESSION_ID))

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
_INT_LIMIT = 2**63  # larger integers exceed those of most JSON readers


class NotReplayableError(TypeError):
    """A value of a type that a recording cannot represent; the message names the type."""


def findings_line(
    attributes: Attributes, digests: Digests
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return findings by "Type/producer", and the names of those that cannot be recorded."""
    recorded: dict[str, Any] = {}
    left_out = []
    for key, value in attributes.items():
        data_type = key.data_type
        if data_type in OWN_NOTES or data_type in _OF_SCHEDULING:
            continue
        try:
            # The first slash of the key separates type and producer.
            if "/" in data_type:
                raise NotReplayableError(data_type)
            if data_type in _IDENTITIES and isinstance(value, str):
                value = digests.of(value)
            recorded[str(key)] = recordable(value)
        except NotReplayableError:
            left_out.append(str(key))
    return recorded, tuple(left_out)


def findings_of(line: Mapping[str, Any]) -> Attributes:
    attributes = Attributes()
    for name, value in line.items():
        data_type, slash, producer = name.partition("/")
        if not slash:
            raise ValueError(f"the finding '{name}' names no producer")
        key: DataKey[Any] = DataKey(data_type, producer)
        attributes[key] = restored(value)
    return attributes


def recordable(value: Any) -> Any:
    """Return `value` in a form that JSON can hold. Raises `NotReplayableError`."""
    if value is None:
        return None
    # The exact type: a subclass would come back as its base.
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
    if not isinstance(value, Mapping):
        raise NotReplayableError(kind.__name__)
    if all(type(key) is str for key in value):
        return [_OBJECT, {recordable(key): recordable(one) for key, one in value.items()}]
    return [_PAIRS, *[[recordable(key), recordable(one)] for key, one in value.items()]]


_SCALARS: Mapping[type[Any], Callable[[Any], Any]] = MappingProxyType(
    {
        bool: lambda value: value,
        str: readable,
        int: lambda value: value if -_INT_LIMIT <= value < _INT_LIMIT else [_INT, str(value)],
        float: lambda value: value if math.isfinite(value) else [_FLOAT, str(value)],
        bytes: lambda value: [_BYTES, base64.b64encode(value).decode()],
    }
)


def restored(value: Any) -> Any:
    """Invert `recordable`; mappings become dicts. Raises `ValueError` for any other input."""
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


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return {key: restored(one) for key, one in value.items()}


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    return {restored(key): restored(one) for key, one in parts}


def _special_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError("no special float")
    return float(text)


def _only(restore: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    def restore_only(parts: list[Any]) -> Any:
        (part,) = parts
        return restore(part)

    return restore_only


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
        _OBJECT: _only(_object),
        _PAIRS: _pairs,
        _FLOAT: _only(_special_float),
        _INT: _only(int),
        _BYTES: _only(lambda text: base64.b64decode(text, validate=True)),
        **{name: _sequence(kind) for name, kind in _SEQUENCES.items()},
        **{name: _known(kind) for name, kind in KNOWN.items()},
    }
)
