"""The section `dataLayer`: sources with their extractors, and discovery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from picker.config.decode import duration_seconds
from picker.config.findings import Findings, Path
from picker.config.instances import Instance, Origin, PluginInstances
from picker.config.schema import EndpointPickerConfig, PluginSpec, SourceSpec
from picker.errors import ConfigError
from picker.framework.interfaces import EndpointObserver
from picker.plugins.discoveries import FileDiscoverySettings
from picker.scrape.sources import DataSource, EndpointExtractor, Extractor, SourceBinding

DEFAULT_SOURCE = "metrics-data-source"
DEFAULT_EXTRACTOR = "core-metrics-extractor"
MODELS_SOURCE = "models-data-source"
MODELS_EXTRACTOR = "models-data-extractor"
MODELS_INTERVAL = "1s"
REPLICA_INTERVALS = (0.01, 2.0)  # seconds; a replica counts as gone after six silent ones
# The readers of the load of endpoints, which the default extractor provides.
READS_LOAD = frozenset(
    {
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "running-requests-size-scorer",
        "lora-affinity-scorer",
        "load-aware-scorer",
        "utilization-filter",
        "utilization-detector",
    }
)


@dataclass(frozen=True, slots=True)
class BoundSource:
    source: Instance
    extractors: tuple[Instance, ...]
    path: Path = ()


@dataclass(frozen=True, slots=True)
class DataLayerPlan:
    """`discovery` is None if the configuration names none. Only `replica_interval_seconds`, between
    two messages to other replicas (None: not configured), can change while the picker runs.
    """

    sources: tuple[BoundSource, ...] = ()
    bindings: tuple[SourceBinding, ...] = ()
    discovery: Instance | None = None
    replica_interval_seconds: float | None = None

    def differences(self, other: DataLayerPlan) -> list[str]:
        """Return the parts of `dataLayer` that differ from `other`."""
        changed = []
        if list(map(_written, self.sources)) != list(map(_written, other.sources)):
            changed.append("dataLayer.sources")
        if _entry(self.discovery) != _entry(other.discovery):
            changed.append("dataLayer.discovery")
        return changed


def plan_data_layer(
    config: EndpointPickerConfig, plugins: PluginInstances, *, lists_models: bool
) -> DataLayerPlan:
    """Bind extractors to sources; with `lists_models`, add a source of models."""
    findings, sources = plugins.findings, list(_sources(config, plugins))
    if lists_models and not any(one.source.type_name == MODELS_SOURCE for one in sources):
        asked = PluginSpec(MODELS_SOURCE, parameters={"interval": MODELS_INTERVAL})
        plugins.add(asked, (), Origin.NEEDED)
        sources += _default(plugins, MODELS_SOURCE, MODELS_EXTRACTOR)
    bindings = [binding for one in sources if (binding := _bind(one, findings)) is not None]
    discovery = None
    for path, name in written_discovery(config):
        discovery = plugins.referenced(name, path)
        if discovery is not None and not isinstance(discovery.plugin, FileDiscoverySettings):
            findings.error(path, f"'{discovery.name}' is not a file-discovery")
            discovery = None
    interval = _replica_interval(config, findings)
    return DataLayerPlan(tuple(sources), tuple(bindings), discovery, interval)


def written_discovery(config: EndpointPickerConfig) -> Iterator[tuple[Path, str]]:
    """Yield the names of discovery plugins with their paths; the later place precedes the older."""
    layer = config.data_layer
    section = layer.discovery if layer else None
    if section is None:
        return
    at: Path = ("dataLayer", "discovery")
    if section.endpoints is not None:
        yield (*at, "endpoints", "pluginRef"), section.endpoints.plugin_ref
    elif section.plugin_ref is not None:
        yield (*at, "pluginRef"), section.plugin_ref


def check_load_is_known(plan: DataLayerPlan, plugins: PluginInstances) -> None:
    """Report plugins that read the load of endpoints if no extractor provides it."""
    known = {one.type_name for bound in plan.sources for one in bound.extractors}
    # After errors the extractor may be part of a source that failed.
    if DEFAULT_EXTRACTOR in known or plugins.findings.has_errors:
        return
    for instance in plugins:
        if instance.type_name in READS_LOAD and instance.path:
            text = f"'{instance.name}' needs the load of endpoints, which a {DEFAULT_EXTRACTOR}"
            text = f"{text} would find out; none is part of a source"
            plugins.findings.error(instance.path, text)


def _replica_interval(config: EndpointPickerConfig, findings: Findings) -> float | None:
    layer = config.data_layer
    if layer is None:
        return None
    path: Path = ("dataLayer", "crossReplica", "syncInterval")
    written = layer.cross_replica and layer.cross_replica.sync_interval
    if not written:
        path, written = ("dataLayer", "crossReplicaSyncInterval"), layer.cross_replica_sync_interval
    if not written:
        return None
    try:
        seconds = duration_seconds(written)
    except ConfigError as error:
        findings.error(path, str(error))
        return None
    low, high = REPLICA_INTERVALS
    if not low <= seconds <= high:
        findings.error(path, f"'{written}' is not within {low:g}s and {high:g}s")
        return None
    return seconds


def _sources(config: EndpointPickerConfig, plugins: PluginInstances) -> Iterator[BoundSource]:
    layer = config.data_layer
    specs = layer.sources if layer else ()
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        path: Path = ("dataLayer", "sources", index)
        bound = _source(spec, path, plugins)
        if spec.plugin_ref in seen:
            plugins.findings.error(path, f"the source '{spec.plugin_ref}' is listed twice")
        elif bound is not None:
            yield bound
        seen.add(spec.plugin_ref)
    # Not `not layer.inject_defaults`: a missing value means true.
    if layer is not None and layer.inject_defaults is False:
        return
    if not any(spec.plugin_ref == DEFAULT_SOURCE for spec in specs):
        yield from _default(plugins, DEFAULT_SOURCE, DEFAULT_EXTRACTOR)


def _default(plugins: PluginInstances, *types: str) -> Iterator[BoundSource]:
    source, extractor = (plugins.default(one) for one in types)
    if source is not None and extractor is not None:
        yield BoundSource(source, (extractor,))


def _source(spec: SourceSpec, path: Path, plugins: PluginInstances) -> BoundSource | None:
    findings = plugins.findings
    source = plugins.referenced(spec.plugin_ref, (*path, "pluginRef"))
    if source is not None and not isinstance(source.plugin, DataSource):
        findings.error((*path, "pluginRef"), f"'{source.name}' is not a data source")
        source = None
    extractors = []
    for index, ref in enumerate(spec.extractors):
        at = (*path, "extractors", index, "pluginRef")
        extractor = plugins.referenced(ref.plugin_ref, at)
        if extractor is None:
            continue
        if isinstance(extractor.plugin, Extractor | EndpointExtractor):
            extractors.append(extractor)
        # Observers are notified of endpoints whether listed or not.
        elif isinstance(extractor.plugin, EndpointObserver):
            findings.warn(at, f"has no effect: '{extractor.name}' knows of endpoints anyway")
        else:
            findings.error(at, f"'{extractor.name}' is not an extractor")
    return BoundSource(source, tuple(extractors), path) if source is not None else None


def _bind(bound: BoundSource, findings: Findings) -> SourceBinding | None:
    source = bound.source.plugin
    if not isinstance(source, DataSource):
        findings.error(bound.source.path, f"'{bound.source.name}' is not a data source")
        return None
    extractors = tuple(
        (one.type_name, one.plugin)
        for one in bound.extractors
        if isinstance(one.plugin, Extractor | EndpointExtractor)
    )
    try:
        return SourceBinding(bound.source.type_name, source, extractors)
    except ValueError as error:
        findings.error(bound.path, str(error))
        return None


def _written(bound: BoundSource) -> tuple[object, ...]:
    return (_entry(bound.source), *map(_entry, bound.extractors))


def _entry(instance: Instance | None) -> object:
    if instance is None:
        return None
    return (instance.name, instance.type_name, instance.parameters)
