"""Attributes of endpoints ↔ what msgpack can carry, so that they come back as they were.

Scalars stand for themselves, everything else is a list that begins with its kind. A finding of a
type of its own has to be listed in `SHARED_TYPES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from picker.framework.findings import Topology
from picker.framework.served_models import ServedModel

SHARED_TYPES: Mapping[str, type[Any]] = MappingProxyType(
    {one.__name__: one for one in (ServedModel, Topology)}
)
_NAMES: Mapping[type[Any], str] = MappingProxyType(
    {one: name for name, one in SHARED_TYPES.items()}
)
_SCALARS = (bool, int, float, str, bytes)
_MAPPING = "{}"
_SEQUENCES: Mapping[str, type[Any]] = MappingProxyType(
    {"()": tuple, "[]": list, "frozenset": frozenset}
)


def shareable(value: Any) -> Any:
    """`value` for msgpack. Raises `TypeError` for a type that nobody has listed."""
    kind = type(value)
    if value is None or kind in _SCALARS:
        return value
    if kind in _NAMES:
        return [_NAMES[kind], *(shareable(getattr(value, one.name)) for one in fields(kind))]
    for name, sequence in _SEQUENCES.items():
        if kind is sequence:
            return [name, *map(shareable, value)]
    if isinstance(value, Mapping):
        return [_MAPPING, *((shareable(key), shareable(one)) for key, one in value.items())]
    raise TypeError(f"a {kind.__name__} cannot be shared between processes")


def restored(value: Any) -> Any:
    """What `shareable` was given; a mapping comes back immutable."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == _MAPPING:
        return MappingProxyType({restored(key): restored(one) for key, one in parts})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(restored, parts))
    return SHARED_TYPES[kind](*map(restored, parts))
