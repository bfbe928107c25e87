"""The plugins of one configuration: created from its entries, found by name, added by default.

A plugin with an unchanged entry is reused from the previous configuration, with its state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgspec

from picker.config.decode import decode
from picker.config.findings import Findings, Path, nearest_name
from picker.config.schema import PLUGIN_TYPES, PluginSpec
from picker.errors import ConfigError
from picker.framework.interfaces import UsesPlugins
from picker.framework.registry import Parameters, PluginType, Registry, Stability
from picker.framework.services import Services


class Origin(Enum):
    CONFIGURED = "configured"
    DEFAULT = "default"
    NEEDED = "auto-created"


@dataclass(frozen=True, slots=True)
class Instance:
    """One plugin with its name, its type and the path of its entry, () without an entry."""

    name: str
    type_name: str
    plugin: object
    path: Path = ()
    parameters: Parameters = field(default_factory=Parameters)
    origin: Origin = Origin.CONFIGURED

    def is_entry_of(self, other: Instance) -> bool:
        """Return whether the entries are equal, so that the plugin of one can serve the other."""
        return self.type_name == other.type_name and self.parameters == other.parameters


class PluginInstances:
    """Owns the plugins during a build; iterates in order of creation. Errors go into `findings`; a
    method that returns None instead of an instance has reported why. `before` are the plugins of
    the configuration in use.
    """

    def __init__(
        self,
        registry: Registry,
        findings: Findings,
        services: Services,
        before: Mapping[str, Instance],
    ) -> None:
        self.registry, self.findings, self._services = registry, findings, services
        self._before = before
        self._by_name: dict[str, Instance] = {}
        self._broken: set[str] = set()
        self._named: set[str] = set()  # by a section, to find unused plugins

    def __iter__(self) -> Iterator[Instance]:
        # A copy: to connect a plugin may create another one during the iteration.
        return iter(tuple(self._by_name.values()))

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    @property
    def is_complete(self) -> bool:
        """False if an entry failed: a plugin that seems to be missing may be of that entry."""
        return not self._broken

    def use(self, instance: Instance) -> None:
        """Note that a section uses the plugin by its kind, without its name."""
        self._named.add(instance.name)

    def is_named(self, instance: Instance) -> bool:
        """Return whether a section, another plugin or a default refers to `instance`."""
        return instance.name in self._named or any(
            instance.name in self.names_in(other) for other in self
        )

    def add(self, spec: PluginSpec, path: Path, origin: Origin = Origin.CONFIGURED) -> None:
        name = spec.name or spec.type
        if name in self._by_name or name in self._broken:
            if name and origin is Origin.CONFIGURED:
                self.findings.error(path, f"a plugin named '{name}' is already configured")
            return
        instance = self._made(name, spec, path, origin)
        if instance is None:
            meant = None if spec.name else nearest_name(spec.type, sorted(self.registry.names))
            self._broken |= {name, meant or name}  # references use the right name
        else:
            self._by_name[name] = instance

    def default(self, type_name: str, origin: Origin = Origin.DEFAULT) -> Instance | None:
        """Return the plugin named like its type; create it unless it is configured."""
        if type_name not in self._by_name and type_name not in self._broken:
            self.add(PluginSpec(type_name), (), origin)
        self._named.add(type_name)
        return self._by_name.get(type_name)

    def referenced(self, name: str, path: Path, types: Sequence[str] = ()) -> Instance | None:
        """Return the plugin that the text at `path` names; `types` are further valid names."""
        self._named.add(name)
        instance = self._by_name.get(name)
        if instance is None and name and name not in self._broken:
            known = {*(one.name for one in self if one.path), *types} or {"none is configured"}
            self.findings.unknown(path, f"there is no plugin '{name}'", name, known)
        return instance

    def referenced_or_type(
        self, name: str, path: Path, types: Sequence[str] = ()
    ) -> Instance | None:
        """Like `referenced`, but create the plugin if the name is a plugin type."""
        if name not in self._by_name and name in self.registry:
            self.add(PluginSpec(name), path, Origin.NEEDED)
        return self.referenced(name, path, types)

    def connect(self) -> None:
        """Give each plugin the plugins that it names; called once, when all configured ones exist.
        A reused plugin is connected already; if one that it names was not, it is created anew.
        """
        if not self._is_free_of_loops():
            return
        # Repeatedly: a plugin created anew makes those stale that name it.
        while stale := [one for one in self if self._lost_a_reference(one)]:
            for instance in stale:
                fresh = self._create(instance)
                if fresh is None:
                    del self._by_name[instance.name]
                    self._broken.add(instance.name)
                else:
                    self._by_name[instance.name] = fresh
        for instance in self:
            if isinstance(instance.plugin, UsesPlugins) and not self._is_reused(instance):
                self._connect(instance, instance.plugin)

    def used_by(self, instance: Instance) -> tuple[str, ...]:
        """Return the names of the plugins that `instance` names, directly or through others."""
        found: dict[str, None] = {}
        pending = list(self.names_in(instance))
        while pending:
            name = pending.pop(0)
            if name not in found and name in self._by_name:
                found[name] = None
                pending.extend(self.names_in(self._by_name[name]))
        return tuple(found)

    def names_in(self, instance: Instance) -> Mapping[str, Path]:
        """Return the names of the plugins that `instance` names, each with its path."""
        if not isinstance(instance.plugin, UsesPlugins):
            return {}
        base = (*instance.path, "parameters")
        references = instance.plugin.references
        return {name: (*base, *where.split(".")) for where, name in references.items()}

    # Creation

    def _made(self, name: str, spec: PluginSpec, path: Path, origin: Origin) -> Instance | None:
        row = self._row(spec.type, path)
        if row is None:
            return None
        at = (*path, "parameters")
        parameters = decode(spec.parameters or {}, row.parameters, at, self.findings)
        if parameters is None:
            return None
        self._warn_of_no_effect(spec.parameters or {}, parameters, at)
        instance = Instance(name, row.name, None, path, parameters, origin)
        # Equal parameters mean equal behaviour, so the old plugin continues with its state.
        before = self._before.get(name)
        if before is not None and instance.is_entry_of(before):
            return replace(instance, plugin=before.plugin)
        return self._create(instance)

    def _warn_of_no_effect(
        self, written: Mapping[str, Any], parameters: Parameters, at: Path
    ) -> None:
        ignored = parameters.without_effect
        in_force = dict(_leaves(msgspec.to_builtins(parameters)))
        for steps, value in _leaves(written):
            name = ".".join(map(str, steps))
            if name in ignored:
                self.findings.warn((*at, *steps), f"has no effect: {ignored[name]}")
            elif value not in ("", None) and in_force.get(steps, value) != value:
                self.findings.warn((*at, *steps), f"has no effect: {in_force[steps]} is in force")

    def _row(self, type_name: str, path: Path) -> PluginType | None:
        findings, at = self.findings, (*path, "type")
        if not type_name:  # reported by the decoder
            return None
        if type_name not in self.registry:
            if type_name in PLUGIN_TYPES:
                text = f"the plugin type '{type_name}' is {PLUGIN_TYPES[type_name]}"
                findings.error(at, text)
            else:
                known = self.registry.names
                findings.unknown(at, f"unknown plugin type '{type_name}'", type_name, known)
            return None
        row = self.registry.get(type_name)
        if type_name != row.name:
            text = f"the plugin type '{type_name}' is deprecated, use '{row.name}'"
            findings.warn(at, text)
        elif row.stability is Stability.DEPRECATED:
            findings.warn(at, f"the plugin type '{type_name}' is deprecated")
        return row

    def _create(self, instance: Instance) -> Instance | None:
        row = self.registry.get(instance.type_name)
        try:
            plugin = row.make(instance.name, instance.parameters, self._services)
        except (ValueError, ConfigError) as error:
            self.findings.error(self._at_fault(instance, str(error)), str(error))
            return None
        return replace(instance, plugin=plugin)

    def _at_fault(self, instance: Instance, text: str) -> Path:
        """Return the path of the first parameter that `text` names, or else of all parameters."""
        # Plugins only raise `ValueError` with a text, and name parameters as in the file.
        words = re.findall(r"\w+", text)
        named = (word for word in words if word in instance.parameters.__struct_encode_fields__)
        return (*instance.path, "parameters", *list(named)[:1])

    # Connections

    def _is_free_of_loops(self) -> bool:
        # A cycle would have no plugin to connect first.
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for instance in self:
            sorter.add(instance.name, *self.names_in(instance))
        try:
            sorter.prepare()
        except CycleError as error:
            loop: list[str] = error.args[1]
            path = self._by_name[loop[0]].path
            self.findings.error(path, f"plugins name each other in a circle: {' → '.join(loop)}")
            return False
        return True

    def _is_reused(self, instance: Instance) -> bool:
        before = self._before.get(instance.name)
        return before is not None and instance.plugin is before.plugin

    def _lost_a_reference(self, instance: Instance) -> bool:
        if not self._is_reused(instance):
            return False
        named = (self._by_name.get(name) for name in self.names_in(instance))
        return any(one is None or not self._is_reused(one) for one in named)

    def _connect(self, instance: Instance, plugin: UsesPlugins) -> None:
        named: dict[str, object] = {}
        for name, path in self.names_in(instance).items():
            other = self.referenced_or_type(name, path)
            if other is None:
                return
            named[name] = other.plugin
        try:
            plugin.connect(named)
        except ValueError as error:
            at = self._at_fault(instance, str(error))
            wrong = [path for name, path in self.names_in(instance).items() if name in str(error)]
            self.findings.error(wrong[0] if wrong else at, str(error))


def _leaves(value: Any, steps: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, (*steps, str(key)))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _leaves(one, (*steps, index))
    else:
        yield steps, value
