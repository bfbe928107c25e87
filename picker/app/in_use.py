"""The configuration that is in use, and its replacement by another one as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from picker.config.build import Assembly, BuildOptions, build
from picker.config.findings import Finding
from picker.config.load import LoadedConfig
from picker.framework.registry import Registry
from picker.metrics.picker_metrics import PickerMetrics
from picker.requestcontrol.bare_requests import BareFilter, BareRequests, BareResponseHook
from picker.requestcontrol.director import RequestPipeline
from picker.requestcontrol.parsing import ParserTable
from picker.requestcontrol.pipeline import FlowGate
from picker.telemetry.wrapping import expose_sizes


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a configuration is built with, the first as well as those that follow."""

    registry: Registry
    metrics: PickerMetrics
    options: BuildOptions


class ConfigInUse:
    """Owns the reference to the assembly in use.

    `apply` replaces it and tells `listeners`, which must not fail: all that can go wrong goes wrong
    before.
    """

    def __init__(self, loaded: LoadedConfig, context: BuildContext) -> None:
        """Raises `ConfigError`."""
        self._context = context
        self._assembly = self._build(loaded, context.options)
        self._listeners: list[Callable[[Assembly], None]] = []
        expose_sizes(context.metrics, self._assembly.instances.values())

    @property
    def assembly(self) -> Assembly:
        """What is in use now."""
        return self._assembly

    @property
    def hash_seed(self) -> int:
        """The secret number that all its plugins were given."""
        return self._context.options.services.hash_seed

    def subscribe(self, listener: Callable[[Assembly], None]) -> None:
        """Call `listener` with every later assembly."""
        self._listeners.append(listener)

    def apply(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        """Put another configuration to use; its warnings.

        Plugins whose entries are unchanged go on with their state. Raises `ConfigError`, and then
        nothing has changed: for what is wrong, and for a change of what is fixed while the picker
        runs.
        """
        return self.commit(self.prepare(loaded))

    def prepare(self, loaded: LoadedConfig) -> Assembly:
        """The objects of another configuration, ready to `commit`. Raises `ConfigError`."""
        before = self._assembly
        known = MappingProxyType(dict(before.instances))
        assembly = self._build(loaded, replace(self._context.options, before=known))
        for section in assembly.data_layer.differences(before.data_layer):
            text = "cannot change while the picker runs; restart it"
            loaded.findings.error(tuple(section.split(".")), text)
        loaded.findings.refuse_errors()
        return assembly

    def commit(self, assembly: Assembly) -> tuple[Finding, ...]:
        """Put to use what was prepared from what is in use now; its warnings."""
        before, self._assembly = self._assembly, assembly
        expose_sizes(self._context.metrics, assembly.instances.values(), before.instances.values())
        for listener in self._listeners:
            listener(assembly)
        return assembly.warnings

    def _build(self, loaded: LoadedConfig, options: BuildOptions) -> Assembly:
        context = self._context
        return build(loaded, context.registry, context.metrics, time.perf_counter, options)


def pipeline_of(assembly: Assembly, gate: FlowGate | None = None) -> RequestPipeline:
    """What the director needs of a configuration; requests wait at `gate` if it wants that."""
    return RequestPipeline(
        parsers=ParserTable(assembly.parsers),
        scheduler=assembly.scheduler,
        producers=assembly.producers,
        hooks=assembly.hooks,
        processors=assembly.processors,
        screeners=assembly.screeners,
        admitters=assembly.admitters,
        saturation=assembly.saturation,
        gate=None if assembly.flow_control is None else gate,
        response_heads=assembly.response_heads,
        response_progress=assembly.response_progress,
        request_ends=assembly.request_ends,
        bare=_bare_requests(assembly),
    )


def _bare_requests(assembly: Assembly) -> BareRequests:
    filters = dict.fromkeys(part.instance.name for plan in assembly.plans for part in plan.filters)
    narrowing = (assembly.instances[name].plugin for name in filters)
    plugins = (one.plugin for one in assembly.instances.values())
    return BareRequests(
        tuple(one for one in narrowing if isinstance(one, BareFilter)),
        tuple(one for one in plugins if isinstance(one, BareResponseHook)),
    )
