"""A decoded configuration → the objects that carry it out. All or nothing; no I/O.

Order: refuse what is not supported → instantiate plugins → fill in defaults → create the data
producers that are needed but not configured → order them → profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from picker.config.instances import Instance, PluginInstances
from picker.config.load import LoadedConfig, Path, Source, load_config
from picker.config.schema import DataSource, SchedulingProfile
from picker.config.timed import (
    TimedFilter,
    TimedPicker,
    TimedPreRequest,
    TimedScheduler,
    TimedScorer,
    Timing,
)
from picker.config.unsupported import check_feature_gates, refuse_unsupported
from picker.errors import ConfigError
from picker.framework.interfaces import (
    DataProducer,
    EndpointObserver,
    Filter,
    Parser,
    Picker,
    PreRequest,
    ProfileHandler,
    Scorer,
)
from picker.framework.registry import Registry
from picker.metrics import PickerMetrics
from picker.plugins.data_sources.metrics_data_source import MetricsDataSource
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings
from picker.plugins.extractors.core_metrics_extractor import CoreMetricsExtractor
from picker.scheduling.profile import Profile, WeightedScorer
from picker.scheduling.scheduler import Scheduler

DEFAULT_CONFIG = b"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
DEFAULT_PARSERS = ("openai-parser", "passthrough-parser")
DEFAULT_PICKER = "max-score-picker"
DEFAULT_PROFILE_HANDLER = "single-profile-handler"
DEFAULT_SOURCE = "metrics-data-source"
DEFAULT_EXTRACTOR = "core-metrics-extractor"
DEFAULT_PROFILE = "default"


@dataclass(frozen=True, slots=True)
class Assembly:
    """Everything a configuration decides, ready to use.

    `producers` are in the order in which they have to run, `hooks` in configured order.
    `discovery` is None when the configuration names none. `instances` are all plugins, those that
    were added by default included.
    """

    scheduler: TimedScheduler
    profiles: Mapping[str, Profile]
    parsers: tuple[Parser, ...]
    producers: tuple[DataProducer, ...]
    hooks: tuple[PreRequest, ...]
    observers: tuple[EndpointObserver, ...]
    metrics_source: MetricsDataSource
    extractor: CoreMetricsExtractor
    discovery: FileDiscoverySettings | None
    instances: tuple[Instance, ...]
    warnings: tuple[str, ...]


def default_config() -> LoadedConfig:
    """The configuration that applies when none is given."""
    return load_config(DEFAULT_CONFIG, "built-in configuration")


def build(
    loaded: LoadedConfig, registry: Registry, metrics: PickerMetrics, clock: Callable[[], float]
) -> Assembly:
    """Make the objects. Raises `ConfigError` that points at the line at fault.

    `clock` is in seconds, for durations only.
    """
    return _Builder(loaded, registry, metrics, clock).build()


class _Builder:
    """Owns the plugins while they are put together."""

    def __init__(
        self,
        loaded: LoadedConfig,
        registry: Registry,
        metrics: PickerMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = loaded.config
        self._source: Source = loaded.source
        self._metrics = metrics
        self._clock = clock
        self._timing = Timing(metrics, clock)
        self._plugins = PluginInstances(registry, loaded.source)
        self._warnings = list(loaded.warnings)

    def build(self) -> Assembly:
        refuse_unsupported(self._config, self._source)
        check_feature_gates(self._config, self._source)
        for index, spec in enumerate(self._config.plugins):
            self._plugins.add(spec, ("plugins", index))
        metrics_source, extractor = self._data_layer()
        discovery = self._discovery()
        handler = self._profile_handler()
        specs = self._profile_specs()
        parsers = self._parsers()
        profiles = {spec.name: self._profile(i, spec) for i, spec in enumerate(specs)}
        self._check_handler(handler, profiles)
        self._plugins.create_missing_producers()
        self._warn_of_idle_plugins(specs)
        scheduler = Scheduler(tuple(profiles.values()), handler)
        return Assembly(
            scheduler=TimedScheduler(scheduler, self._metrics, self._clock),
            profiles=profiles,
            parsers=parsers,
            producers=tuple(
                self._timing.producer(instance) for instance in self._plugins.ordered_producers()
            ),
            hooks=self._hooks(),
            observers=tuple(
                instance.plugin
                for instance in self._plugins
                if isinstance(instance.plugin, EndpointObserver)
            ),
            metrics_source=metrics_source,
            extractor=extractor,
            discovery=discovery,
            instances=tuple(self._plugins),
            warnings=(*self._warnings, *self._plugins.warnings),
        )

    def _hooks(self) -> tuple[PreRequest, ...]:
        return tuple(
            TimedPreRequest(instance.plugin, self._timing.stopwatch("PreRequest", instance))
            for instance in self._plugins
            if isinstance(instance.plugin, PreRequest)
        )

    # Request handling and data layer

    def _parsers(self) -> tuple[Parser, ...]:
        handler = self._config.request_handler
        refs: list[tuple[Path, str]] = [
            (("requestHandler", "parsers", index), ref.plugin_ref)
            for index, ref in enumerate(handler.parsers if handler else ())
        ]
        if self._config.parser is not None:
            self._warnings.append("'parser' is deprecated, use requestHandler.parsers")
            refs = refs or [(("parser",), self._config.parser.plugin_ref)]
        if not refs:
            return tuple(self._parser(self._plugins.default(name), ()) for name in DEFAULT_PARSERS)
        return tuple(
            self._parser(self._plugins.referenced_or_type(name, path), path) for path, name in refs
        )

    def _parser(self, instance: Instance, path: Path) -> Parser:
        if not isinstance(instance.plugin, Parser):
            raise self._source.error(path, f"'{instance.name}' is not a parser")
        return instance.plugin

    def _data_layer(self) -> tuple[MetricsDataSource, CoreMetricsExtractor]:
        layer = self._config.data_layer
        sources: Sequence[DataSource] = layer.sources if layer else ()
        path: Path = ("dataLayer", "sources", 0) if sources else ()
        refs = [ref.plugin_ref for ref in sources[0].extractors] if sources else []
        if len(sources) > 1 or len(refs) > 1:
            text = "more than one source or extractor is not supported yet"
            raise self._source.error(("dataLayer", "sources"), text)
        if sources:
            source = self._plugins.referenced(sources[0].plugin_ref, path)
        else:
            source = self._plugins.default(DEFAULT_SOURCE)
        if not isinstance(source.plugin, MetricsDataSource):
            raise self._source.error(path, f"'{source.name}' is not a {DEFAULT_SOURCE}")
        if refs:
            path = (*path, "extractors", 0)
            extractor = self._plugins.referenced(refs[0], path)
        else:
            extractor = self._plugins.default(DEFAULT_EXTRACTOR)
        if not isinstance(extractor.plugin, CoreMetricsExtractor):
            raise self._source.error(path, f"'{extractor.name}' is not a {DEFAULT_EXTRACTOR}")
        return source.plugin, extractor.plugin

    def _discovery(self) -> FileDiscoverySettings | None:
        layer = self._config.data_layer
        if layer is None or layer.discovery is None:
            return None
        path: Path = ("dataLayer", "discovery")
        instance = self._plugins.referenced(layer.discovery.plugin_ref, path)
        if not isinstance(instance.plugin, FileDiscoverySettings):
            raise self._source.error(path, f"'{instance.name}' is not a file-discovery")
        return instance.plugin

    # Scheduling

    def _profile_handler(self) -> ProfileHandler:
        configured = [
            (instance.path, instance.plugin)
            for instance in self._plugins
            if isinstance(instance.plugin, ProfileHandler)
        ]
        if len(configured) > 1:
            text = "this is a second profile handler, there can be only one"
            raise self._source.error(configured[1][0], text)
        if configured:
            return configured[0][1]
        if len(self._config.scheduling_profiles) > 1:
            text = "no profile handler is configured, which several profiles need"
            raise self._source.error(("schedulingProfiles",), text)
        plugin = self._plugins.default(DEFAULT_PROFILE_HANDLER).plugin
        if not isinstance(plugin, ProfileHandler):
            raise ConfigError(f"{DEFAULT_PROFILE_HANDLER} is not a profile handler")
        return plugin

    def _check_handler(self, handler: ProfileHandler, profiles: Mapping[str, Profile]) -> None:
        if handler.max_profiles is not None and len(profiles) > handler.max_profiles:
            text = f"the profile handler takes at most {handler.max_profiles}, not {len(profiles)}"
            raise self._source.error(("schedulingProfiles",), text)

    def _profile_specs(self) -> Sequence[SchedulingProfile]:
        """The configured profiles, else one that holds every filter, scorer and picker."""
        specs = self._config.scheduling_profiles
        names: set[str] = set()
        for index, spec in enumerate(specs):
            if not spec.name or spec.name in names:
                text = f"'{spec.name}' is taken by another profile" if spec.name else "is empty"
                raise self._source.error(("schedulingProfiles", index, "name"), text)
            names.add(spec.name)
        return specs or (SchedulingProfile(DEFAULT_PROFILE),)

    def _profile(self, index: int, spec: SchedulingProfile) -> Profile:
        filters: list[TimedFilter] = []
        scorers: list[WeightedScorer] = []
        pickers: list[TimedPicker] = []
        for instance, weight, path in self._parts(index, spec):
            plugin = instance.plugin
            if isinstance(plugin, Filter):
                filters.append(TimedFilter(plugin, self._timing.stopwatch("Filter", instance)))
            if isinstance(plugin, Scorer):
                timed = TimedScorer(plugin, self._timing.stopwatch("Scorer", instance))
                scorers.append(WeightedScorer(timed, weight))
            if isinstance(plugin, Picker):
                if pickers:
                    text = f"'{instance.name}' is a second picker of the profile '{spec.name}'"
                    raise self._source.error(path, text)
                pickers.append(TimedPicker(plugin, self._timing.stopwatch("Picker", instance)))
        picker = pickers[0] if pickers else self._default_picker()
        return Profile(spec.name, picker, tuple(filters), tuple(scorers))

    def _parts(self, index: int, spec: SchedulingProfile) -> list[tuple[Instance, float, Path]]:
        """The plugins of a profile with their weights; of the default profile, all plugins."""
        if not self._config.scheduling_profiles:
            return [(instance, 1.0, instance.path) for instance in self._plugins]
        parts: list[tuple[Instance, float, Path]] = []
        for position, part in enumerate(spec.plugins):
            path: Path = ("schedulingProfiles", index, "plugins", position)
            instance = self._plugins.referenced(part.plugin_ref, path)
            self._check_part(instance, part.weight, path)
            parts.append((instance, 1.0 if part.weight is None else part.weight, path))
        return parts

    def _check_part(self, instance: Instance, weight: float | None, path: Path) -> None:
        if not isinstance(instance.plugin, Filter | Scorer | Picker):
            text = f"'{instance.name}' is neither a filter, a scorer nor a picker"
            raise self._source.error((*path, "pluginRef"), text)
        if weight is None:
            return
        if not math.isfinite(weight):
            raise self._source.error((*path, "weight"), "must be a finite number")
        if not isinstance(instance.plugin, Scorer):
            self._warnings.append(f"'{instance.name}' is no scorer, its weight has no effect")

    def _default_picker(self) -> TimedPicker:
        configured = [one for one in self._plugins if isinstance(one.plugin, Picker)]
        instance = configured[0] if configured else self._plugins.default(DEFAULT_PICKER)
        if not isinstance(instance.plugin, Picker):
            raise ConfigError(f"'{instance.name}' is not a picker")
        return TimedPicker(instance.plugin, self._timing.stopwatch("Picker", instance))

    def _warn_of_idle_plugins(self, specs: Sequence[SchedulingProfile]) -> None:
        """A filter or scorer that no profile names would be ignored silently."""
        if not self._config.scheduling_profiles:
            return
        used = {part.plugin_ref for spec in specs for part in spec.plugins}
        for instance in self._plugins:
            if isinstance(instance.plugin, Filter | Scorer) and instance.name not in used:
                self._warnings.append(f"no profile uses the plugin '{instance.name}'")
