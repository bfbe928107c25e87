"""The plugins of one configuration: made from its entries, found by name, added by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from picker.config.catalog import NOT_SUPPORTED_YET
from picker.config.load import Path, Source
from picker.config.schema import PluginSpec
from picker.errors import ConfigError
from picker.framework.attributes import DataKey
from picker.framework.interfaces import ConsumesData, DataProducer, ProducesData
from picker.framework.registry import Registry
from picker.framework.services import NO_SERVICES, Services


@dataclass(frozen=True, slots=True)
class Instance:
    """One plugin: what the configuration calls it, its type, itself, and where it is written."""

    name: str
    type_name: str
    plugin: object
    path: Path = ()


class PluginInstances:
    """Owns the plugins while a configuration is put together; iterates in order of creation."""

    def __init__(
        self, registry: Registry, source: Source, services: Services = NO_SERVICES
    ) -> None:
        self._registry = registry
        self._source = source
        self._services = services
        self._by_name: dict[str, Instance] = {}
        self.warnings: list[str] = []

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._by_name.values()))

    def add(self, spec: PluginSpec, path: Path) -> Instance:
        """Make the plugin of one entry. Raises `ConfigError` at the key that is at fault."""
        name = spec.name or spec.type
        if name in self._by_name:
            raise self._source.error(path, f"a plugin named '{name}' is already configured")
        if spec.type in NOT_SUPPORTED_YET and spec.type not in self._registry:
            text = f"the plugin type '{spec.type}' is not supported yet"
            raise self._source.error((*path, "type"), text)
        try:
            row = self._registry.get(spec.type)
        except ConfigError as error:
            raise self._source.error((*path, "type"), str(error)) from None
        if spec.type != row.name:
            self.warnings.append(f"plugin type '{spec.type}' is deprecated, use '{row.name}'")
        at = (*path, "parameters")
        parameters = self._source.decode(spec.parameters or {}, row.parameters, at)
        try:
            plugin = row.make(name, parameters, self._services)
        except ValueError as error:
            raise self._source.error(at, str(error)) from error
        self._by_name[name] = Instance(name, row.name, plugin, path)
        return self._by_name[name]

    def default(self, type_name: str) -> Instance:
        """The plugin called like its type, made now unless it is configured."""
        return self._by_name.get(type_name) or self.add(PluginSpec(type_name), ())

    def referenced(self, name: str, path: Path) -> Instance:
        """The plugin that the entry at `path` calls `name`. Raises `ConfigError`."""
        instance = self._by_name.get(name)
        if instance is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            text = f"there is no plugin '{name}', configured: {known}"
            raise self._source.error((*path, "pluginRef"), text)
        return instance

    def referenced_or_type(self, name: str, path: Path) -> Instance:
        """Like `referenced`, but an unlisted name that is a plugin type makes one."""
        if name not in self._by_name and name in self._registry:
            return self.add(PluginSpec(name), path)
        return self.referenced(name, path)

    def create_missing_producers(self) -> None:
        """Make the default producer of every finding that a plugin needs and nobody produces.

        Repeated, as a producer may need findings itself. Raises `ConfigError`.
        """
        while missing := self._missing():
            consumer, key = missing
            row = self._registry.default_producer(key.data_type)
            if row is None or row.name != key.producer:
                text = f"nothing produces {key}, which '{consumer.name}' needs"
                raise self._source.error(consumer.path, text)
            self.add(PluginSpec(row.name), ())

    def ordered_producers(self) -> list[Instance]:
        """Data producers, each after those whose findings it needs. Raises `ConfigError`."""
        by_key = self._producers_by_key()
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for instance in self:
            if isinstance(instance.plugin, DataProducer):
                needs = (
                    instance.plugin.consumes if isinstance(instance.plugin, ConsumesData) else ()
                )
                sorter.add(instance.name, *(by_key[key] for key in needs))
        try:
            return [self._by_name[name] for name in sorter.static_order()]
        except CycleError as error:
            loop = " → ".join(error.args[1])
            raise ConfigError(f"data producers need each other: {loop}") from error

    def _missing(self) -> tuple[Instance, DataKey[Any]] | None:
        produced = self._producers_by_key()
        for instance in self:
            if isinstance(instance.plugin, ConsumesData):
                for key in instance.plugin.consumes:
                    if key not in produced:
                        return instance, key
        return None

    def _producers_by_key(self) -> dict[DataKey[Any], str]:
        return {
            key: instance.name
            for instance in self
            if isinstance(instance.plugin, ProducesData)
            for key in instance.plugin.produces
        }
