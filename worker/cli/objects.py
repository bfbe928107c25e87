"""Flags whose value is a JSON object: strict decoding, with `ConfigError` for every mistake."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from worker.errors import ConfigError

T = TypeVar("T")


def decoded(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{flag}: not a JSON object: {error}") from error


def converted(flag: str, given: Mapping[str, Any], kind: type[T]) -> T:
    """Convert an object to a dataclass; it may have no other fields."""
    refuse_unknown(flag, given, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    try:
        return msgspec.convert(given, kind)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(f"{flag}: {error}") from error


def refuse_unknown(flag: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{flag}: unknown {name!r}; known are {', '.join(known)}")
