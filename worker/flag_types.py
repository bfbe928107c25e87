"""Flags as rows, and their argument types; a value out of range is refused with the bound."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Flag(NamedTuple):
    """One flag. `kind` is its argparse type, the words there are, or bool of a switch. `field` is
    what a configuration calls it, where the flag is spelled otherwise; its default is the field's.
    `metavar` is what help calls its value.
    """

    name: str
    kind: Callable[[str], Any] | Sequence[str]
    text: str
    field: str | None = None
    metavar: str | None = None


def add_flags(group: argparse._ArgumentGroup, flags: Sequence[Flag]) -> None:
    """Add rows to the group of a parser that has, or gets, the defaults of the fields."""
    for name, kind, text, field, metavar in flags:
        dest = field or name.removeprefix("--").replace("-", "_")
        if kind is bool:
            switch = argparse.BooleanOptionalAction
            group.add_argument(name, dest=dest, action=switch, help=text)
        elif callable(kind):
            group.add_argument(name, dest=dest, type=kind, metavar=metavar, help=text)
        else:
            group.add_argument(name, dest=dest, choices=kind, help=text)


def field_defaults(*kinds: Any) -> dict[str, Any]:
    """The defaults of the fields of configurations, by name; the first that has one counts."""
    fields = [field for kind in reversed(kinds) for field in dataclasses.fields(kind)]
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def configured(kind: Callable[..., T], options: argparse.Namespace, **others: Any) -> T:
    """A configuration: `others`, and for every other field what the flag of its name says."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{n: getattr(options, n) for n in names if hasattr(options, n)} | others)


class at_least:  # noqa: N801 (an argparse type, called like a function)
    """An integer with a lower bound."""

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self.__name__ = "integer"  # "invalid integer value: 'x'" is what argparse makes of it

    def __call__(self, text: str) -> int:
        value = int(text)
        if value < self._minimum:
            raise argparse.ArgumentTypeError(f"must be at least {self._minimum}, got {value}")
        return value


def power_of_two(text: str) -> int:
    """1, 2, 4, 8, …"""
    value = int(text)
    if value < 1 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"must be a power of two, got {value}")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """1,2,4: whole numbers of 1 or more."""
    values = tuple(map(int, text.split(",")))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 each, got {text}")
    return values


def networks(text: str) -> tuple[str, ...]:
    """10.8.0.0/16,fd00::/8: networks in CIDR notation."""
    try:
        return tuple(str(ipaddress.ip_network(one.strip())) for one in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def json_texts(text: str) -> tuple[str, ...]:
    """["a","b"]: a JSON list of strings, as vLLM's flags have it."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f'must be a list such as ["*"]: {error}') from error


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def port(text: str) -> int:
    """A TCP port; 0 is any that is free."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text}")
    return value


class seconds_at_least:  # noqa: N801 (an argparse type, called like a function)
    """A finite number with a lower bound."""

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum
        self.__name__ = "number"

    def __call__(self, text: str) -> float:
        value = float(text)
        if not self._minimum <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {self._minimum:g}, got {text}")
        return value


def not_negative(text: str) -> float:
    """A finite number of 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def byte_count(text: str) -> int:
    """A number of bytes: plain, or with K, M, G or T (powers of 1024) behind it."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    factor = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(unit)
    if factor is None or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 4G, got {text}")
    value = int(float(number) * factor)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
