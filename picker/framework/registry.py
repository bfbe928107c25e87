"""Plugin types, and the immutable table of all of them.

A plugin file defines `PLUGIN = PluginType(...)`, the type that the file is named after, or
`PLUGINS`, several types. `config.catalog.builtin_plugins()` collects them into a `Registry` value
when the picker starts; importing a plugin registers nothing.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Annotated, TypeAlias

import msgspec

from picker.errors import ConfigError
from picker.framework.services import NO_SERVICES, Services


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of every plugin's `parameters`; also the parameters of a plugin that takes none.

    Fields hold the effective values: `__post_init__` replaces a written value that is not in force.
    A field `…_producer_name` that is "" gets its default, because templates write "" if no producer
    was chosen.
    """

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if field.endswith("producer_name") and getattr(self, field) == "":
                defaults = {one.name: one.default for one in msgspec.structs.fields(type(self))}
                msgspec.structs.force_setattr(self, field, defaults[field])

    @property
    def without_effect(self) -> Mapping[str, str]:
        """The reasons why accepted parameters have no effect, by their dotted keys."""
        return {}


# Limits that parameters share; the decoder enforces them.
PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Stability(Enum):
    """The maturity of a plugin type; alpha types need `--allow-experimental-plugins`."""

    ALPHA = "alpha"
    BETA = "beta"
    DEPRECATED = "deprecated"


class PluginType:
    """One row of the registry: a type of plugins, described by its constructor.

    The constructor is passed those of `name` (of the instance, for its findings), `parameters` and
    `services` that it has arguments for, and may raise `ValueError` for well-typed but invalid
    values. A subclass of `Parameters` is a plugin that is its own parameters. `default_for` lists
    the data types for which this producer is created automatically if a plugin needs them and no
    producer is configured.
    """

    def __init__(
        self,
        name: str,
        constructor: Callable[..., object],
        stability: Stability = Stability.BETA,
        *,
        parameters: type[Parameters] | None = None,
        default_for: tuple[str, ...] = (),
        deprecated_aliases: tuple[str, ...] = (),
    ) -> None:
        """`parameters` defaults to the annotation of the constructor's argument."""
        if isinstance(constructor, type) and issubclass(constructor, Parameters):
            parameters, constructor = constructor, _itself
        taken = inspect.signature(constructor, eval_str=True).parameters
        annotated = taken["parameters"].annotation if "parameters" in taken else Parameters
        self.name, self.stability = name, stability
        self.parameters: type[Parameters] = parameters or annotated
        self.default_for, self.deprecated_aliases = default_for, deprecated_aliases
        self._constructor = constructor
        self._arguments = [one for one in ("name", "parameters", "services") if one in taken]

    def make(self, name: str, parameters: Parameters, services: Services = NO_SERVICES) -> object:
        """Create an instance; without `services` it asks no server. Raises `ValueError`."""
        given = {"name": name, "parameters": parameters, "services": services}
        return self._constructor(**{argument: given[argument] for argument in self._arguments})


def _itself(parameters: object) -> object:
    return parameters


class Registry:
    def __init__(self, types: Iterable[PluginType]) -> None:
        table: dict[str, PluginType] = {}
        for row in types:
            for name in (row.name, *row.deprecated_aliases):
                if name in table:
                    raise ConfigError(f"two plugins are registered under the type '{name}'")
                table[name] = row
        self._types: Mapping[str, PluginType] = MappingProxyType(table)

    def __iter__(self) -> Iterator[PluginType]:
        return iter({row.name: row for row in self._types.values()}.values())

    def __contains__(self, type_name: str) -> bool:
        return type_name in self._types

    @property
    def names(self) -> frozenset[str]:
        """All types that a configuration may name, including deprecated names."""
        return frozenset(self._types)

    def get(self, type_name: str) -> PluginType:
        """Look up a plugin type. Raises `ConfigError` with the nearest known name."""
        try:
            return self._types[type_name]
        except KeyError:
            raise ConfigError(self._unknown(type_name)) from None

    def default_producer(self, data_type: str, name: str = "") -> PluginType | None:
        """Return the producer type that is created automatically for `data_type`, if any; of
        several, the one called `name`.
        """
        rows = [row for row in self if data_type in row.default_for]
        return next((row for row in rows if row.name == name), rows[0] if rows else None)

    def _unknown(self, type_name: str) -> str:
        near = difflib.get_close_matches(type_name, self._types, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(self._types))}"
        return f"unknown plugin type '{type_name}'; {hint}"
