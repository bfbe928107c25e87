"""Plugins → their measured selves, for each extension point that they fulfil."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from picker.config.instances import Instance, PluginInstances
from picker.config.scope import Scope
from picker.config.timed import (
    Stopwatch,
    TimedFilter,
    TimedPicker,
    TimedProfileHandler,
    TimedScorer,
)
from picker.config.timed_requests import (
    PrefixMatches,
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
)
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    Filter,
    Picker,
    PreRequest,
    ProducesData,
    ProfileHandler,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Scorer,
    Screener,
)
from picker.metrics import PickerMetrics
from picker.prefix.match import MATCH_INFO


@runtime_checkable
class SizedIndex(Protocol):
    """A plugin that keeps an index whose size is worth a gauge."""

    @property
    def index_size(self) -> int:
        """Entries held now."""
        ...


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Makes the wrappers. `clock` is in seconds and never goes back."""

    plugins: PluginInstances
    metrics: PickerMetrics
    clock: Callable[[], float]
    is_strict: bool

    # The scheduler's

    def filter(self, instance: Instance, plugin: Filter) -> TimedFilter:
        """A filter."""
        watch, scope = self._measures("Filter", instance)
        return TimedFilter(instance.name, plugin, watch, scope)

    def scorer(self, instance: Instance, plugin: Scorer) -> TimedScorer:
        """A scorer."""
        watch, scope = self._measures("Scorer", instance)
        return TimedScorer(instance.name, plugin, watch, scope)

    def picker(self, instance: Instance, plugin: Picker) -> TimedPicker:
        """A picker."""
        return TimedPicker(instance.name, plugin, self._stopwatch("Picker", instance))

    def profile_handler(self, instance: Instance, plugin: ProfileHandler) -> TimedProfileHandler:
        """A profile handler; it may touch what the plugins that it uses may touch."""
        picking, scope = self._measures("ProfilePicker", instance)
        processing = self._stopwatch("ProcessProfilesResults", instance)
        return TimedProfileHandler(instance.name, plugin, picking, processing, scope)

    # Those around it

    def producers(
        self, instances: Iterable[Instance]
    ) -> tuple[TimedProducer | TimedAsyncProducer, ...]:
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
            TimedScreener(one.name, one.plugin, self._stopwatch("Screener", one))
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
        return TimedSaturationDetector(instance.name, plugin, watch, scope)

    def pre_requests(self) -> tuple[TimedPreRequest, ...]:
        """Pre-request hooks."""
        return tuple(
            TimedPreRequest(one.name, one.plugin, *self._measures("PreRequest", one))
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
            TimedRequestEnd(one.name, one.plugin, self._stopwatch("ResponseComplete", one))
            for one in self.plugins
            if isinstance(one.plugin, RequestEndHook)
        )

    def _producer(self, instance: Instance) -> TimedProducer | TimedAsyncProducer:
        watch, scope = self._measures("DataProducer", instance)
        matches = self._matches(instance)
        plugin = instance.plugin
        if isinstance(plugin, AsyncDataProducer):
            timeout = plugin.timeout_seconds
            return TimedAsyncProducer(instance.name, plugin, watch, scope, timeout, matches)
        if not isinstance(plugin, DataProducer):
            raise TypeError(f"'{instance.name}' is not a data producer")
        return TimedProducer(instance.name, plugin, watch, scope, matches)

    def _matches(self, instance: Instance) -> PrefixMatches | None:
        plugin = instance.plugin
        keys = plugin.produces if isinstance(plugin, ProducesData) else ()
        key = next((key for key in keys if key.data_type == MATCH_INFO), None)
        if key is None:
            return None
        labels = (instance.name, instance.type_name)
        return PrefixMatches(
            key,
            self.metrics.prefix_indexer_hit_ratio.labels(*labels),
            self.metrics.prefix_indexer_hit_bytes.labels(*labels),
        )

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
