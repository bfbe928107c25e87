"""Reads values at paths of documents of unknown origin: JSON, decoded and unchecked."""

from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigPart:
    """A part of a configuration, and the name of its place that texts use."""

    place: str
    document: Json


def at(value: Any, *path: str) -> Any:
    """Return the value at the end of a path of keys; None if there is none."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def listed(value: Any, *path: str) -> list[Json]:
    found = at(value, *path)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def mapped(value: Any, *path: str) -> Json:
    found = at(value, *path)
    return found if isinstance(found, dict) else {}


def texts(value: Any, *path: str) -> list[str]:
    found = at(value, *path)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def seconds(value: Any) -> float | None:
    """Read a duration in JSON's spelling ("0.250s"); return None for anything else."""
    if not isinstance(value, str) or not value.endswith("s"):
        return None
    try:
        return float(value[:-1])
    except ValueError:
        return None


def number(value: Any) -> int | None:
    """Read a number, also one that JSON has in quotes because it may be large."""
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None


def type_of(value: Any) -> str:
    config = at(value, "typed_config")
    return str(at(value if config is None else config, "@type") or "")
