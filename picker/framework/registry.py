"""What a plugin type is, and the immutable table of all of them.

A plugin file holds one class and one constant, `PLUGIN = PluginType(...)`, and its name is its
config type in snake case. `config.build.builtin_plugins()` collects these constants into a
`Registry` value when the picker starts; importing a plugin registers nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from picker.errors import ConfigError
from picker.framework.services import NO_SERVICES, Services


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of every plugin's `parameters`; also the parameters of a plugin that takes none.

    Fields hold the values in force: where another value applies than the one that is written,
    `__post_init__` puts it there. A field `…_producer_name` that is "" has its default: that names
    no producer, and templates write it where nothing was chosen.
    """

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if field.endswith("producer_name") and getattr(self, field) == "":
                defaults = {one.name: one.default for one in msgspec.structs.fields(type(self))}
                msgspec.structs.force_setattr(self, field, defaults[field])

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Why a parameter changes nothing although it is accepted, by its dotted key."""
        return {}


# Limits that parameters share. The decoder refuses what is outside of them.
PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]


P = TypeVar("P", bound=Parameters)


class Stability(Enum):
    """How settled a plugin type is; alpha ones need `--allow-experimental-plugins`."""

    ALPHA = "alpha"
    BETA = "beta"
    DEPRECATED = "deprecated"


@dataclass(frozen=True, slots=True)
class PluginType(Generic[P]):
    """One row of the registry.

    `name` is what the configuration calls the type (kebab case). `create(name, parameters,
    services)` makes an instance that the configuration calls `name`; it may raise `ValueError` for
    values that are well-typed but make no sense. `default_for` lists the data types for which this
    producer is created by itself when a plugin needs them and no producer is configured.
    """

    name: str
    parameters: type[P]
    create: Callable[[str, P, Services], object]
    default_for: tuple[str, ...] = ()
    deprecated_aliases: tuple[str, ...] = ()
    stability: Stability = Stability.BETA

    def make(self, name: str, parameters: P, services: Services = NO_SERVICES) -> object:
        """An instance; without `services` one that asks no server. Raises `ValueError`."""
        return self.create(name, parameters, services)


# `create` of the plugin types that need less than all of its arguments.


def plain(make: Callable[[], object]) -> Callable[[str, Parameters, Services], object]:
    """A plugin without parameters."""
    return lambda _name, _parameters, _services: make()


def configured(make: Callable[[P], object]) -> Callable[[str, P, Services], object]:
    """A plugin that needs its parameters alone."""
    return lambda _name, parameters, _services: make(parameters)


def named(make: Callable[[str, P], object]) -> Callable[[str, P, Services], object]:
    """A plugin that needs its name, for what it writes, and its parameters."""
    return lambda name, parameters, _services: make(name, parameters)


def itself(_name: str, parameters: Parameters, _services: Services) -> object:
    """The parameters are the plugin."""
    return parameters


class Registry:
    """Name → plugin type. Immutable."""

    def __init__(self, types: Iterable[PluginType[Any]]) -> None:
        table: dict[str, PluginType[Any]] = {}
        for row in types:
            for name in (row.name, *row.deprecated_aliases):
                if name in table:
                    raise ConfigError(f"two plugins are registered under the type '{name}'")
                table[name] = row
        self._types: Mapping[str, PluginType[Any]] = MappingProxyType(table)

    def __iter__(self) -> Iterator[PluginType[Any]]:
        return iter({row.name: row for row in self._types.values()}.values())

    def __contains__(self, type_name: str) -> bool:
        return type_name in self._types

    @property
    def names(self) -> frozenset[str]:
        """All that a configuration may write as a type, deprecated names too."""
        return frozenset(self._types)

    def get(self, type_name: str) -> PluginType[Any]:
        """The plugin type. Raises `ConfigError` with the nearest known name."""
        try:
            return self._types[type_name]
        except KeyError:
            raise ConfigError(self._unknown(type_name)) from None

    def default_producer(self, data_type: str, name: str = "") -> PluginType[Any] | None:
        """The producer type that is created by itself for `data_type`, if there is one.

        Of several, the one called `name`.
        """
        rows = [row for row in self if data_type in row.default_for]
        return next((row for row in rows if row.name == name), rows[0] if rows else None)

    def _unknown(self, type_name: str) -> str:
        near = difflib.get_close_matches(type_name, self._types, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(self._types))}"
        return f"unknown plugin type '{type_name}'; {hint}"
