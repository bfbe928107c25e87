"""Wrappers that time plugins and count decisions, so that no plugin measures itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from prometheus_client import Histogram

from picker.config.instances import Instance
from picker.errors import ConfigError, PickerError
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import (
    DataProducer,
    Filter,
    Picker,
    PreRequest,
    ProducesData,
    Scorer,
)
from picker.metrics import PickerMetrics
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.scheduling.scheduler import Scheduler
from picker.types import Candidate, InferenceRequest, SchedulingResult, ScoredEndpoint

Clock = Callable[[], float]
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Where one plugin's durations go. `clock` is in seconds and never goes back."""

    durations: Histogram
    clock: Clock

    def stop(self, started: float) -> None:
        """Record the time since `started`."""
        self.durations.observe(self.clock() - started)


@dataclass(frozen=True, slots=True)
class TimedFilter:
    """A filter and its stopwatch."""

    inner: Filter
    watch: Stopwatch

    def filter(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> Sequence[Candidate]:
        """What the inner filter says."""
        started = self.watch.clock()
        try:
            return self.inner.filter(request, candidates, attributes, rng)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedScorer:
    """A scorer and its stopwatch."""

    inner: Scorer
    watch: Stopwatch

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """What the inner scorer says."""
        started = self.watch.clock()
        try:
            return self.inner.score(request, candidates, attributes)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedPicker:
    """A picker and its stopwatch."""

    inner: Picker
    watch: Stopwatch

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """What the inner picker says."""
        started = self.watch.clock()
        try:
            return self.inner.pick(scored, rng)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedProducer:
    """A data producer and its stopwatch."""

    inner: DataProducer
    watch: Stopwatch

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        started = self.watch.clock()
        try:
            return self.inner.produce(request, candidates, attributes)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class MeasuredPrefixProducer:
    """A producer of prefix matches; the best match of each request goes into two histograms."""

    inner: DataProducer
    key: DataKey[PrefixCacheMatchInfo]
    hit_ratio: Histogram
    hit_bytes: Histogram

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        request = self.inner.produce(request, candidates, attributes)
        info = attributes.get(self.key)
        if info is not None and info.total_blocks:
            best = max(info.match_blocks.values(), default=0)
            self.hit_ratio.observe(best / info.total_blocks)
            self.hit_bytes.observe(best * info.block_size_tokens * BYTES_PER_TOKEN)
        return request


@dataclass(frozen=True, slots=True)
class TimedPreRequest:
    """A pre-request hook and its stopwatch."""

    inner: PreRequest
    watch: Stopwatch

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """What the inner hook does."""
        started = self.watch.clock()
        try:
            return self.inner.pre_request(request, result, attributes)
        finally:
            self.watch.stop(started)


class TimedScheduler:
    """A scheduler whose decisions are timed and counted by outcome."""

    def __init__(self, inner: Scheduler, metrics: PickerMetrics, clock: Clock) -> None:
        self._inner = inner
        self._metrics = metrics
        self._watch = Stopwatch(metrics.scheduler_e2e_duration_seconds, clock)

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """What the inner scheduler decides."""
        started = self._watch.clock()
        _, model, _, _ = self._metrics.request_labels("", request.target_model)
        try:
            result = self._inner.schedule(request, candidates, attributes, rng)
        except PickerError:
            self._count("failure", model, "", "", "")
            raise
        finally:
            self._watch.stop(started)
        first = result.endpoints[0]
        self._count("success", model, first.name, first.namespace, str(first.port))
        return result

    def _count(self, status: str, model: str, name: str, namespace: str, port: str) -> None:
        self._metrics.scheduler_attempts_total.labels(status, model, name, namespace, port).inc()


@runtime_checkable
class SizedIndex(Protocol):
    """A plugin that keeps an index whose size is worth a gauge."""

    @property
    def index_size(self) -> int:
        """Entries held now."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Makes the wrappers. `clock` is in seconds and never goes back."""

    metrics: PickerMetrics
    clock: Clock

    def stopwatch(self, extension_point: str, instance: Instance) -> Stopwatch:
        """The stopwatch of one plugin at one extension point."""
        durations = self.metrics.plugin_duration_seconds.labels(
            extension_point, instance.type_name, instance.name
        )
        return Stopwatch(durations, self.clock)

    def producer(self, instance: Instance) -> DataProducer:
        """The instance, which is a data producer, with everything measured about it."""
        plugin = instance.plugin
        if not isinstance(plugin, DataProducer):
            raise ConfigError(f"'{instance.name}' is not a data producer")
        timed = TimedProducer(plugin, self.stopwatch("DataProducer", instance))
        labels = (instance.name, instance.type_name)
        if isinstance(plugin, SizedIndex):
            index = plugin
            self.metrics.prefix_indexer_size.labels(*labels).set_function(lambda: index.index_size)
        keys = plugin.produces if isinstance(plugin, ProducesData) else ()
        match_key = next((key for key in keys if key.data_type == MATCH_INFO), None)
        if match_key is None:
            return timed
        return MeasuredPrefixProducer(
            timed,
            match_key,
            self.metrics.prefix_indexer_hit_ratio.labels(*labels),
            self.metrics.prefix_indexer_hit_bytes.labels(*labels),
        )
