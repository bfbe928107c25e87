"""Wrappers that time plugins of the scheduler and count decisions, so that no plugin measures
itself. Each carries the plugin's `name`, which failures are told under.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from picker.errors import PickerError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Filter, Picker, ProfileHandler, Scorer
from picker.metrics.picker_metrics import PickerMetrics
from picker.metrics.series import Histogram
from picker.scheduling.scheduler import Scheduler
from picker.telemetry.scope import Scope
from picker.types import (
    Candidate,
    InferenceRequest,
    ProfileResult,
    SchedulingResult,
    ScoredEndpoint,
)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Where one plugin's durations go. `clock` is in seconds and never goes back."""

    durations: Histogram
    clock: Clock

    def stop(self, started: float) -> float:
        """Record the time since `started`, and return it."""
        seconds = self.clock() - started
        self.durations.observe(seconds)
        return seconds


@dataclass(frozen=True, slots=True)
class TimedFilter:
    """A filter and its stopwatch."""

    name: str
    inner: Filter
    watch: Stopwatch
    scope: Scope

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
            return self.inner.filter(request, candidates, self.scope.over(attributes), rng)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedScorer:
    """A scorer and its stopwatch."""

    name: str
    inner: Scorer
    watch: Stopwatch
    scope: Scope

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """What the inner scorer says."""
        started = self.watch.clock()
        try:
            return self.inner.score(request, candidates, self.scope.over(attributes))
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedPicker:
    """A picker and its stopwatch."""

    name: str
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
class TimedProfileHandler:
    """A profile handler and the stopwatches of its two questions."""

    name: str
    inner: ProfileHandler
    picking: Stopwatch
    processing: Stopwatch
    scope: Scope

    @property
    def max_profiles(self) -> int | None:
        """The inner handler's."""
        return self.inner.max_profiles

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        """What the inner handler says."""
        started = self.picking.clock()
        try:
            scoped = self.scope.over(attributes)
            return self.inner.pick_profiles(request, profiles, results, scoped)
        finally:
            self.picking.stop(started)

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """What the inner handler says."""
        started = self.processing.clock()
        try:
            return self.inner.process_results(request, results)
        finally:
            self.processing.stop(started)


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
        model = self._metrics.model_label(request.target_model)
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
