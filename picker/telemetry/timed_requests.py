"""Wrappers that time the plugins around the scheduler: what looks at a request before it, and what
hears of its response. Each carries the plugin's `name`, which failures are told under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.flow import DEFAULT_SETTLE_SECONDS, JudgesStaleness, SettlesLate
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    Flight,
    PreRequest,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Screener,
)
from picker.telemetry.recorded import (
    DecisionRecorder,
    EndRecorder,
    FindingRecorder,
    StrictSelections,
)
from picker.telemetry.scope import Scope
from picker.telemetry.timed import Stopwatch
from picker.types import (
    Candidate,
    FinishCause,
    InferenceRequest,
    Metadata,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
    Usage,
)


@dataclass(frozen=True, slots=True)
class TimedProcessor:
    """A request processor and its stopwatch."""

    name: str
    inner: RequestProcessor
    watch: Stopwatch

    def process(self, request: InferenceRequest) -> InferenceRequest:
        """What the inner processor says."""
        started = self.watch.clock()
        try:
            return self.inner.process(request)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedScreener:
    """A screener and its stopwatch."""

    name: str
    inner: Screener
    watch: Stopwatch
    recorder: StrictSelections | None = None

    def screen(
        self, request: InferenceRequest, candidates: Sequence[Candidate], rng: Random
    ) -> Sequence[Candidate]:
        """What the inner screener says."""
        started = self.watch.clock()
        try:
            kept = self.inner.screen(request, candidates, rng)
        finally:
            self.watch.stop(started)
        if self.recorder is not None:
            self.recorder.screened(request, candidates, kept)
        return kept


@dataclass(frozen=True, slots=True)
class TimedProducer:
    """A data producer and its stopwatch."""

    name: str
    inner: DataProducer
    watch: Stopwatch
    scope: Scope
    recorder: FindingRecorder | None = None

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        started, seconds = self.watch.clock(), 0.0
        try:
            request = self.inner.produce(request, candidates, self.scope.over(attributes))
        finally:
            seconds = self.watch.stop(started)
        if self.recorder is not None:
            self.recorder.found(request, attributes, seconds)
        return request


@dataclass(slots=True)
class TimedAsyncProducer:
    """A data producer that asks another server, and its stopwatch."""

    name: str
    inner: AsyncDataProducer
    watch: Stopwatch
    scope: Scope
    timeout_seconds: float
    recorder: FindingRecorder | None = None

    async def look_up(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        started, seconds = self.watch.clock(), 0.0
        try:
            request = await self.inner.look_up(request, candidates, self.scope.over(attributes))
        finally:
            seconds = self.watch.stop(started)
        if self.recorder is not None:
            self.recorder.found(request, attributes, seconds)
        return request


@dataclass(frozen=True, slots=True)
class TimedAdmitter:
    """An admitter and its stopwatch."""

    name: str
    inner: Admitter
    watch: Stopwatch
    scope: Scope

    def admit(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> None:
        """What the inner admitter says."""
        started = self.watch.clock()
        try:
            self.inner.admit(request, candidates, self.scope.over(attributes), rng)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedSaturationDetector:
    """A saturation detector and its stopwatch."""

    name: str
    inner: SaturationDetector
    watch: Stopwatch
    scope: Scope

    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        """What the inner detector says."""
        started = self.watch.clock()
        try:
            return self.inner.saturation(candidates, self.scope.over(attributes), now_seconds)
        finally:
            self.watch.stop(started)

    @property
    def settle_seconds(self) -> float:
        """What the inner detector says."""
        if not isinstance(self.inner, SettlesLate):
            return DEFAULT_SETTLE_SECONDS
        return self.inner.settle_seconds


class TimedStalenessDetector(TimedSaturationDetector):
    """One that also knows how much of what it says rests on old metrics."""

    __slots__ = ()

    def stale(self, candidates: Sequence[Candidate], now_seconds: float) -> int:
        """How many the inner detector judges without fresh metrics."""
        inner = self.inner
        return inner.stale(candidates, now_seconds) if isinstance(inner, JudgesStaleness) else 0


@dataclass(frozen=True, slots=True)
class TimedPreRequest:
    """A pre-request hook and its stopwatch."""

    name: str
    inner: PreRequest
    watch: Stopwatch
    scope: Scope
    recorder: DecisionRecorder | None = None

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """What the inner hook does."""
        started = self.watch.clock()
        try:
            headers = self.inner.pre_request(request, result, self.scope.over(attributes))
        finally:
            self.watch.stop(started)
        if self.recorder is not None:
            self.recorder.decided(request, result, attributes)
        return headers


@dataclass(frozen=True, slots=True)
class TimedResponseHead:
    """A hook on the beginning of responses and its stopwatch."""

    name: str
    inner: ResponseHeadHook
    watch: Stopwatch

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """What the inner hook says."""
        started = self.watch.clock()
        try:
            return self.inner.response_head(flight, head)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedResponseProgress:
    """A hook on pieces of responses and its stopwatch."""

    name: str
    inner: ResponseProgressHook
    watch: Stopwatch

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        """What the inner hook says."""
        started = self.watch.clock()
        try:
            return self.inner.response_progress(flight, progress)
        finally:
            self.watch.stop(started)


@dataclass(frozen=True, slots=True)
class TimedRequestEnd:
    """A hook on the end of requests and its stopwatch."""

    name: str
    inner: RequestEndHook
    watch: Stopwatch
    recorder: EndRecorder | None = None

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """What the inner hook does."""
        started = self.watch.clock()
        try:
            self.inner.request_ended(flight, cause, usage, now_seconds)
        finally:
            self.watch.stop(started)
        if self.recorder is not None:
            self.recorder.ended(flight, cause, usage, now_seconds)
