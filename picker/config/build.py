"""Builds the objects of a decoded configuration, all or none; no I/O.

All errors are collected before they are reported together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from picker.config.data_keys import (
    check_layers,
    create_missing_producers,
    producers_in_order,
    warn_of_unread,
)
from picker.config.data_layer import DataLayerPlan, check_load_is_known, plan_data_layer
from picker.config.findings import Finding, Findings, InvalidConfigError, Path
from picker.config.flow_control import plan_detector, plan_flow_control, warn_of_filtering_detector
from picker.config.instances import Instance, PluginInstances
from picker.config.load import LoadedConfig, load_config
from picker.config.profiles import ProfilePlan, ProfilePlanner, names_in
from picker.config.schema import EndpointPickerConfig, check_supported
from picker.decisions.steps import SCHEDULER, BoundPlugin, Scope
from picker.flowcontrol.settings import FlowControlSettings
from picker.framework import interfaces
from picker.framework.registry import Registry, Stability
from picker.framework.services import NO_SERVICES, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.requestcontrol.pipeline import (
    BodylessFilter,
    BodylessRequests,
    BodylessResponseHook,
    FlowGate,
    ParserTable,
    RequestPipeline,
)
from picker.scheduling.scheduler import Profile, Scheduler
from picker.telemetry.detectors import measured
from picker.telemetry.meters import SchedulingAttempts, meter_of

# Chosen in simulation: docs/decisions/0060-the-default-is-the-expected-cost.md.
DEFAULT_CONFIG = b"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: expected-cost-scorer}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: expected-cost-scorer}
"""
DEFAULT_PARSERS = (
    "openai-parser",
    "anthropic-parser",
    "vllmhttp-parser",
    "sglanghttp-parser",
    "passthrough-parser",  # last, because it takes every path that is left
)
# The extension points at which plugins get attributes.
_SCOPED = frozenset(
    ("DataProducer", "Admitter", "SaturationDetector", "ProfilePicker", "Filter", "Scorer")
) | {"PreRequest"}
TOKEN_LIMITS = "token-limits"  # of the shelf
_NO_INSTANCES: Mapping[str, Instance] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """`before` are the plugins in use: those with unchanged entries are reused with their state.
    With `strict_data_scope` plugins cannot access findings that they do not declare. With
    `lists_models` endpoints are asked for their models, with `token_limits` there is a plugin of
    that type, whatever the configuration says.
    """

    services: Services = NO_SERVICES
    allow_experimental: bool = False
    strict_data_scope: bool = False
    lists_models: bool = False
    token_limits: bool = False
    before: Mapping[str, Instance] = field(default_factory=lambda: _NO_INSTANCES)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The `pipeline` is what the director runs, without a gate. `instances` include plugins that
    were added by default; `experimental` names those of alpha types.
    """

    pipeline: RequestPipeline
    profiles: Mapping[str, Profile]
    plans: tuple[ProfilePlan, ...]
    handler: Instance
    detector: Instance | None
    observers: tuple[interfaces.EndpointObserver, ...]
    flushes: Mapping[str, interfaces.BackgroundFlush]
    data_layer: DataLayerPlan
    instances: Mapping[str, Instance]
    experimental: tuple[str, ...]
    warnings: tuple[Finding, ...]
    loaded: LoadedConfig
    flow_control: FlowControlSettings | None = None  # None: the gate 'flowControl' is off

    @property
    def screeners(self) -> tuple[BoundPlugin[interfaces.Screener], ...]:
        return self.pipeline.screeners

    def gated(self, gate: FlowGate | None) -> RequestPipeline:
        """Return the pipeline; requests wait at `gate` if the configuration has flow control."""
        return replace(self.pipeline, gate=None if self.flow_control is None else gate)


def default_config() -> LoadedConfig:
    return load_config(DEFAULT_CONFIG, "built-in configuration")


def build(
    loaded: LoadedConfig,
    registry: Registry,
    metrics: PickerMetrics,
    clock: Callable[[], float],
    options: BuildOptions | None = None,
) -> Assembly:
    """Create the objects. Raises `InvalidConfigError` with all errors."""
    options = options or BuildOptions()
    plugins = PluginInstances(registry, loaded.findings, options.services, options.before)
    return _Builder(loaded, plugins, metrics, clock, options).build()


@dataclass(frozen=True, slots=True)
class _Builder:
    loaded: LoadedConfig
    plugins: PluginInstances
    metrics: PickerMetrics
    clock: Callable[[], float]
    options: BuildOptions

    def build(self) -> Assembly:
        plugins, findings, config = self.plugins, self.plugins.findings, self.loaded.config
        # First what is refused anyway, so that its errors come with all others.
        check_supported(config, findings)
        for index, spec in enumerate(config.plugins):
            plugins.add(spec, ("plugins", index))
        if self.options.token_limits:
            plugins.default(TOKEN_LIMITS)
        # After all plugins exist, since a plugin may name one that is configured below it.
        plugins.connect()
        planner = ProfilePlanner(config, plugins)
        plans = planner.profiles()
        handler = planner.profile_handler(len(plans))
        lists_models = self.options.lists_models
        data_layer = plan_data_layer(config, plugins, lists_models=lists_models)
        parsers = plan_parsers(config, plugins)
        detector = plan_detector(config, plugins)
        if not findings.has_errors:
            warn_of_filtering_detector(plans, detector, findings)
        flow_control = plan_flow_control(config, plugins, detector)
        # After every section has created its default plugins, which may consume data as well.
        create_missing_producers(plugins)
        producers = producers_in_order(plugins)
        check_layers(plugins)
        check_load_is_known(data_layer, plugins)
        if not findings.has_errors:  # otherwise a plugin may only seem unused
            in_profiles = names_in(plans)
            warn_of_unread(plugins, in_profiles)
            planner.warn_of_unnamed(in_profiles)
        self._check_stability()
        findings.refuse_errors()
        if handler is None:
            raise TypeError("a configuration without errors has a profile handler")
        assembly = self._assembly(plans, handler, data_layer, parsers, detector, producers)
        # Flow control calls the same detector as the pipeline, so that its duration is measured.
        saturation = assembly.pipeline.saturation
        if flow_control is not None and saturation is not None:
            flow_control = replace(flow_control, detector=saturation)
        return replace(assembly, flow_control=flow_control)

    def _check_stability(self) -> None:
        if self.options.allow_experimental:
            return
        for instance in self._experimental():
            text = f"'{instance.name}' is experimental; start with --allow-experimental-plugins"
            self.plugins.findings.error(instance.path, text)

    def _experimental(self) -> Iterator[Instance]:
        for instance in self.plugins:
            if self.plugins.registry.get(instance.type_name).stability is Stability.ALPHA:
                yield instance

    def _assembly(
        self,
        plans: list[ProfilePlan],
        handler: Instance,
        data_layer: DataLayerPlan,
        parsers: tuple[interfaces.Parser, ...],
        detector: Instance | None,
        producers: list[Instance],
    ) -> Assembly:
        profiles = {plan.name: self._profile(plan) for plan in plans}
        saturation = None
        if detector is not None and isinstance(detector.plugin, interfaces.SaturationDetector):
            saturation = measured(self._bound("SaturationDetector", detector), self.clock)
        section = self.loaded.config.request_handler
        pipeline = RequestPipeline(
            parsers=ParserTable(parsers),
            scheduler=self._scheduler(profiles, handler),
            producers=tuple(self._bound("DataProducer", one) for one in producers),
            hooks=self._all("PreRequest", interfaces.PreRequest),
            processors=self._all("RequestProcessor", interfaces.RequestProcessor),
            screeners=self._all("Screener", interfaces.Screener),
            admitters=self._all("Admitter", interfaces.Admitter),
            saturation=saturation,
            response_heads=self._all("ResponseReceived", interfaces.ResponseHeadHook),
            response_progress=self._all("ResponseStreaming", interfaces.ResponseProgressHook),
            request_ends=self._all("ResponseComplete", interfaces.RequestEndHook),
            bodyless=self._bodyless(plans),
            propagates_priority=bool(section and section.propagate_priority),
        )
        return Assembly(
            pipeline=pipeline,
            profiles=profiles,
            plans=tuple(plans),
            handler=handler,
            detector=detector,
            observers=self._plugins_of(interfaces.EndpointObserver),
            flushes={
                one.name: one.plugin
                for one in self.plugins
                if isinstance(one.plugin, interfaces.BackgroundFlush)
            },
            data_layer=data_layer,
            instances={one.name: one for one in self.plugins},
            experimental=tuple(one.name for one in self._experimental()),
            warnings=tuple(self.plugins.findings),
            loaded=self.loaded,
        )

    def _scheduler(
        self, profiles: Mapping[str, Profile], handler: Instance
    ) -> BoundPlugin[Scheduler]:
        if not isinstance(handler.plugin, interfaces.ProfileHandler):
            raise TypeError(f"'{handler.name}' is not a profile handler")
        asking = self._bound("ProfilePicker", handler)
        processing = self._bound("ProcessProfilesResults", handler)
        scheduler = Scheduler(tuple(profiles.values()), asking, processing)
        durations = self.metrics.scheduler_e2e_duration_seconds
        bound = BoundPlugin(scheduler, SCHEDULER, durations=durations)
        bound.meter = SchedulingAttempts(self.metrics)
        return bound

    def _bodyless(self, plans: list[ProfilePlan]) -> BodylessRequests:
        # A filter of several profiles runs once, in the order of its first use.
        filters = dict.fromkeys(part.instance.name for plan in plans for part in plan.filters)
        narrowing = (self.plugins[name].plugin for name in filters)
        return BodylessRequests(
            tuple(one for one in narrowing if isinstance(one, BodylessFilter)),
            self._plugins_of(BodylessResponseHook),
        )

    def _plugins_of(self, kind: Any) -> tuple[Any, ...]:
        return tuple(one.plugin for one in self.plugins if isinstance(one.plugin, kind))

    def _profile(self, plan: ProfilePlan) -> Profile:
        name, part = plan.name, plan.picker
        if part is None:
            raise TypeError(f"the profile '{name}' has no picker")
        filters = [self._bound("Filter", one.instance, profile=name) for one in plan.filters]
        scorers = [
            self._bound("Scorer", one.instance, profile=name, weight=one.weight)
            for one in plan.scorers
        ]
        picker = self._bound("Picker", part.instance, profile=name)
        return Profile(name, picker, filters, scorers)

    def _all(self, point: str, kind: Any) -> tuple[BoundPlugin[Any], ...]:
        return tuple(
            self._bound(point, one) for one in self.plugins if isinstance(one.plugin, kind)
        )

    def _bound(
        self, point: str, instance: Instance, *, profile: str = "", weight: float = 1.0
    ) -> BoundPlugin[Any]:
        """Return a plugin with its meter and its scope: the data it and its plugins declare."""
        name, type_name, metrics = instance.name, instance.type_name, self.metrics
        plugin = instance.plugin
        labels = (point, type_name, name)
        durations = metrics.plugin_duration_seconds.labels(*labels)
        bound = BoundPlugin(
            plugin, point, name, type_name, profile=profile, weight=weight, durations=durations
        )
        bound.meter = meter_of(point, name, type_name, plugin, metrics)
        # The plugins that it calls read the attributes in its name.
        if point in _SCOPED:
            used = [self.plugins[one].plugin for one in self.plugins.used_by(instance)]
            violations = metrics.plugin_data_scope_violations_total
            bound.scope = Scope(name, (plugin, *used), violations, labels)
            if self.options.strict_data_scope:
                bound.scope.never_lift()
        return bound


def check_config(
    content: bytes, name: str, registry: Registry, options: BuildOptions
) -> tuple[Finding, ...]:
    """Return all findings, in the order of the file; if any is an error, no picker would start."""
    try:
        _, assembly = assemble(content, name, registry, options)
    except InvalidConfigError as error:
        return error.findings
    return assembly.warnings


def assemble(
    content: bytes, name: str, registry: Registry, options: BuildOptions
) -> tuple[LoadedConfig, Assembly]:
    """Load and build a configuration, without metrics. Raises `InvalidConfigError`."""
    loaded = load_config(content, name)
    # No plugin runs, so no clock and no shared metrics are needed.
    return loaded, build(loaded, registry, PickerMetrics(), lambda: 0.0, options)


def plan_parsers(
    config: EndpointPickerConfig, plugins: PluginInstances
) -> tuple[interfaces.Parser, ...]:
    """Return the configured parsers, or the default ones."""
    section, findings = config.request_handler, plugins.findings
    refs: list[tuple[Path, str]] = [
        (("requestHandler", "parsers", index, "pluginRef"), ref.plugin_ref)
        for index, ref in enumerate(section.parsers if section else ())
    ]
    if config.parser is not None:
        text = "'parser' is deprecated, use requestHandler.parsers"
        findings.warn(("parser",), text + ("; those apply" if refs else ""))
        refs = refs or [(("parser", "pluginRef"), config.parser.plugin_ref)]
    if not refs:
        instances = [plugins.default(name) for name in DEFAULT_PARSERS if name in plugins.registry]
        return tuple(
            one.plugin
            for one in instances
            if one is not None and isinstance(one.plugin, interfaces.Parser)
        )
    found = [(path, plugins.referenced_or_type(name, path)) for path, name in refs]
    return tuple(_effective([(path, one) for path, one in found if one is not None], findings))


def _effective(refs: list[tuple[Path, Instance]], findings: Findings) -> list[interfaces.Parser]:
    """Return the effective parsers: one of each type, none after one that takes every path."""
    parsers: list[interfaces.Parser] = []
    types: set[str] = set()
    fallback: str | None = None
    for path, instance in refs:
        parser = instance.plugin
        if not isinstance(parser, interfaces.Parser):
            findings.error(path, f"'{instance.name}' is not a parser")
        elif instance.type_name in types:
            findings.warn(path, f"a second {instance.type_name} has no effect")
        elif fallback is not None:
            text = f"has no effect after '{fallback}', which takes every path that is left"
            findings.warn(path, text)
        else:
            types.add(instance.type_name)
            parsers.append(parser)
            fallback = None if parser.claims else instance.name
    return parsers
