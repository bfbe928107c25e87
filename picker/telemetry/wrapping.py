"""Plugins → their measured selves, for each extension point that they fulfil."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from picker.config.instances import Instance, PluginInstances
from picker.framework.flow import JudgesStaleness
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    Filter,
    Picker,
    PreRequest,
    ProfileHandler,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Scorer,
    Screener,
)
from picker.framework.tracing import Tracer
from picker.metrics.picker_metrics import PickerMetrics
from picker.scheduling.profile import Profile
from picker.telemetry.recorded import Recorders
from picker.telemetry.scope import Scope
from picker.telemetry.timed import (
    Stopwatch,
    TimedFilter,
    TimedPicker,
    TimedProfileHandler,
    TimedScorer,
)
from picker.telemetry.timed_requests import (
    TimedAdmitter,
    TimedAsyncProducer,
    TimedPreRequest,
    TimedProcessor,
    TimedProducer,
    TimedRequestEnd,
    TimedResponseHead,
    TimedResponseProgress,
    TimedSaturationDetector,
    TimedScreener,
    TimedStalenessDetector,
)
from picker.telemetry.traced import (
    ASKING_SPANS,
    HANDLER_SPANS,
    PRODUCER_SPANS,
    STAGES_TYPES,
    TracedAsyncProducer,
    TracedProducer,
    TracedProfile,
    TracedProfileHandler,
    TracedScorer,
    TracedStages,
)

Producer: TypeAlias = TimedProducer | TimedAsyncProducer | TracedProducer | TracedAsyncProducer


@runtime_checkable
class SizedIndex(Protocol):
    """A plugin that keeps an index whose size is worth a gauge."""

    @property
    def index_size(self) -> int:
        """Entries held now."""
        ...


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Makes the wrappers. `clock` is in seconds and never goes back.

    With a `tracer`, the steps of decisions become spans as well.
    """

    plugins: PluginInstances
    metrics: PickerMetrics
    clock: Callable[[], float]
    is_strict: bool
    tracer: Tracer | None = None

    # The scheduler's

    def filter(self, instance: Instance, plugin: Filter) -> TimedFilter:
        """A filter."""
        watch, scope = self._measures("Filter", instance)
        return TimedFilter(instance.name, plugin, watch, scope)

    def scorer(
        self, instance: Instance, plugin: Scorer, weight: float
    ) -> TimedScorer | TracedScorer:
        """A scorer, which is to have `weight`."""
        watch, scope = self._measures("Scorer", instance)
        timed = TimedScorer(instance.name, plugin, watch, scope)
        if self.tracer is None:
            return timed
        return TracedScorer(instance.name, timed, self.tracer, instance.type_name, weight)

    def profile(self, profile: Profile) -> Profile | TracedProfile:
        """A profile made of plugins that are wrapped."""
        return profile if self.tracer is None else TracedProfile(profile, self.tracer)

    def picker(self, instance: Instance, plugin: Picker) -> TimedPicker:
        """A picker."""
        return TimedPicker(instance.name, plugin, self._stopwatch("Picker", instance))

    def profile_handler(
        self, instance: Instance, plugin: ProfileHandler
    ) -> TimedProfileHandler | TracedProfileHandler:
        """A profile handler; it may touch what the plugins that it uses may touch."""
        picking, scope = self._measures("ProfilePicker", instance)
        processing = self._stopwatch("ProcessProfilesResults", instance)
        timed = TimedProfileHandler(instance.name, plugin, picking, processing, scope)
        span = HANDLER_SPANS.get(instance.type_name)
        if self.tracer is None or span is None:
            return timed
        return TracedProfileHandler(instance.name, timed, self.tracer, span)

    # Those around it

    def producers(self, instances: Iterable[Instance]) -> tuple[Producer, ...]:
        """Data producers, in the order given."""
        return tuple(self._producer(instance) for instance in instances)

    def processors(self) -> tuple[TimedProcessor, ...]:
        """Request processors."""
        return tuple(
            TimedProcessor(one.name, one.plugin, self._stopwatch("RequestProcessor", one))
            for one in self.plugins
            if isinstance(one.plugin, RequestProcessor)
        )

    def screeners(self) -> tuple[TimedScreener, ...]:
        """Screeners."""
        return tuple(
            TimedScreener(
                one.name,
                one.plugin,
                self._stopwatch("Screener", one),
                self._recorders.of_screening(one),
            )
            for one in self.plugins
            if isinstance(one.plugin, Screener)
        )

    def admitters(self) -> tuple[TimedAdmitter, ...]:
        """Admitters."""
        return tuple(
            TimedAdmitter(one.name, one.plugin, *self._measures("Admitter", one))
            for one in self.plugins
            if isinstance(one.plugin, Admitter)
        )

    def saturation(self, instance: Instance, plugin: SaturationDetector) -> TimedSaturationDetector:
        """A saturation detector."""
        watch, scope = self._measures("SaturationDetector", instance)
        judges = isinstance(plugin, JudgesStaleness)
        kind = TimedStalenessDetector if judges else TimedSaturationDetector
        return kind(instance.name, plugin, watch, scope)

    def pre_requests(self) -> tuple[TimedPreRequest | TracedStages, ...]:
        """Pre-request hooks."""
        return tuple(
            self._pre_request(one, one.plugin)
            for one in self.plugins
            if isinstance(one.plugin, PreRequest)
        )

    def response_heads(self) -> tuple[TimedResponseHead, ...]:
        """Hooks on the beginning of responses."""
        return tuple(
            TimedResponseHead(one.name, one.plugin, self._stopwatch("ResponseReceived", one))
            for one in self.plugins
            if isinstance(one.plugin, ResponseHeadHook)
        )

    def response_progress(self) -> tuple[TimedResponseProgress, ...]:
        """Hooks on pieces of responses."""
        return tuple(
            TimedResponseProgress(one.name, one.plugin, self._stopwatch("ResponseStreaming", one))
            for one in self.plugins
            if isinstance(one.plugin, ResponseProgressHook)
        )

    def request_ends(self) -> tuple[TimedRequestEnd, ...]:
        """Hooks on the end of requests."""
        return tuple(
            TimedRequestEnd(
                one.name,
                one.plugin,
                self._stopwatch("ResponseComplete", one),
                self._recorders.of_ends(one),
            )
            for one in self.plugins
            if isinstance(one.plugin, RequestEndHook)
        )

    def _producer(self, instance: Instance) -> Producer:
        name, plugin, tracer = instance.name, instance.plugin, self.tracer
        watch, scope = self._measures("DataProducer", instance)
        recorder = self._recorders.of_findings(instance)
        if isinstance(plugin, AsyncDataProducer):
            span = ASKING_SPANS.get(instance.type_name)
            timeout = plugin.timeout_seconds
            asking = TimedAsyncProducer(name, plugin, watch, scope, timeout, recorder)
            if tracer is None or span is None:
                return asking
            return TracedAsyncProducer(name, asking, tracer, span, timeout)
        if not isinstance(plugin, DataProducer):
            raise TypeError(f"'{name}' is not a data producer")
        span = PRODUCER_SPANS.get(instance.type_name)
        timed = TimedProducer(name, plugin, watch, scope, recorder)
        return (
            timed if tracer is None or span is None else TracedProducer(name, timed, tracer, span)
        )

    def _pre_request(
        self, instance: Instance, plugin: PreRequest
    ) -> TimedPreRequest | TracedStages:
        watch, scope = self._measures("PreRequest", instance)
        recorder = self._recorders.of_decisions(instance)
        timed = TimedPreRequest(instance.name, plugin, watch, scope, recorder)
        if self.tracer is None or instance.type_name not in STAGES_TYPES:
            return timed
        return TracedStages(instance.name, timed, self.tracer)

    @property
    def _recorders(self) -> Recorders:
        return Recorders(self.metrics)

    def _measures(self, extension_point: str, instance: Instance) -> tuple[Stopwatch, Scope]:
        labels = (extension_point, instance.type_name, instance.name)
        violations = self.metrics.plugin_data_scope_violations_total
        used = [self.plugins[name].plugin for name in self.plugins.used_by(instance)]
        scope = Scope(instance.name, (instance.plugin, *used), violations, labels)
        if self.is_strict:
            scope.never_lift()
        return self._stopwatch(extension_point, instance), scope

    def _stopwatch(self, extension_point: str, instance: Instance) -> Stopwatch:
        durations = self.metrics.plugin_duration_seconds.labels(
            extension_point, instance.type_name, instance.name
        )
        return Stopwatch(durations, self.clock)


def expose_sizes(
    metrics: PickerMetrics, now: Iterable[Instance], before: Iterable[Instance] = ()
) -> None:
    """Show the sizes of the indexes in use, and no longer of those that are gone."""
    gauge = metrics.prefix_indexer_size
    sized = {
        (one.name, one.type_name): one.plugin for one in now if isinstance(one.plugin, SizedIndex)
    }
    for labels, index in sized.items():
        gauge.labels(*labels).set_function(partial(_size, index))
    for one in before:
        gone = (one.name, one.type_name)
        if isinstance(one.plugin, SizedIndex) and gone not in sized:
            gauge.remove(*gone)


def _size(index: SizedIndex) -> float:
    return index.index_size
