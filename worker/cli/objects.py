"""Flags whose value is a JSON object: strict decoding, with `ConfigError` for every mistake."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from worker.errors import ConfigError

T = TypeVar("T")
Kind = tuple[Any, str]  # the type of a field's values, and the same in words


def integer(least: int, most: int) -> Kind:
    return Annotated[int, Meta(ge=least, le=most)], f"an integer in [{least}, {most}]"


def word(choices: tuple[str, ...]) -> Kind:
    return Literal[choices], f"one of {', '.join(choices)}"


def checked(flag: str, name: str, value: Any, kind: Kind) -> Any:
    """Convert the value of a field. Raises `ConfigError` that says what it must be."""
    try:
        return msgspec.convert(value, kind[0])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag}: {name} must be {kind[1]}, got {value!r}") from error


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
