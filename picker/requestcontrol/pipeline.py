"""What the director works with: the steps that a configuration decides, and what requests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from picker.datalayer.inflight import InflightLoad
from picker.framework.attributes import Attributes
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    PreRequest,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Screener,
)
from picker.framework.tracing import NoTracer, Tracer
from picker.requestcontrol.candidates import LoadedCandidates
from picker.requestcontrol.observer import RequestObserver
from picker.requestcontrol.parsing import ParserTable
from picker.requestcontrol.rewrite import NO_REWRITES, RewriteRules
from picker.types import Candidate, InferenceRequest, SchedulingResult


class PoolSnapshot(Protocol):
    """The pool at one moment."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Every endpoint with its last metrics."""
        ...


class SnapshotSource(Protocol):
    """Hands out immutable snapshots of the pool."""

    def snapshot(self) -> PoolSnapshot:
        """The pool now."""
        ...


class RequestScheduler(Protocol):
    """Decides among candidates."""

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """The decision. Raises `RefusedError`."""
        ...


class ObjectiveSource(Protocol):
    """Knows what the names of objectives stand for."""

    def priority(self, objective: str) -> int | None:
        """Its priority; None: there is no such objective, or it names no priority."""
        ...


class RewriteSource(Protocol):
    """Knows the rules by which models are rewritten."""

    def rules(self) -> RewriteRules:
        """The rules now."""
        ...


class NoObjectives:
    """Knows no objective."""

    def priority(self, objective: str) -> int | None:
        """None."""
        return None


class NoRewrites:
    """Knows no rule."""

    def rules(self) -> RewriteRules:
        """No rules."""
        return NO_REWRITES


@dataclass(frozen=True, slots=True)
class RequestPipeline:
    """Everything a configuration decides about a request; a reload swaps it as a whole.

    Everything runs in the order given. A producer that has `look_up` is awaited, with its timeout.
    """

    parsers: ParserTable
    scheduler: RequestScheduler
    producers: tuple[DataProducer | AsyncDataProducer, ...] = ()
    hooks: tuple[PreRequest, ...] = ()
    processors: tuple[RequestProcessor, ...] = ()
    screeners: tuple[Screener, ...] = ()
    admitters: tuple[Admitter, ...] = ()
    saturation: SaturationDetector | None = None
    response_heads: tuple[ResponseHeadHook, ...] = ()
    response_progress: tuple[ResponseProgressHook, ...] = ()
    request_ends: tuple[RequestEndHook, ...] = ()
    asks_others: bool = field(init=False)  # whether a decision may have to wait

    def __post_init__(self) -> None:
        asking = any(hasattr(producer, "look_up") for producer in self.producers)
        object.__setattr__(self, "asks_others", asking)


@dataclass(frozen=True, slots=True)
class RequestPolicies:
    """What is decided about requests outside the configuration file.

    With `emit_endpoint_scores` the proxy is told every candidate's score; with
    `ignore_subset_hint` the whole pool may serve whatever the proxy says.
    """

    objectives: ObjectiveSource = field(default_factory=NoObjectives)
    rewrites: RewriteSource = field(default_factory=NoRewrites)
    tracer: Tracer = field(default_factory=NoTracer)
    emit_endpoint_scores: bool = False
    ignore_subset_hint: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What requests share beyond the configuration; `clock` is monotonic, in seconds."""

    datastore: SnapshotSource
    inflight: InflightLoad
    rng: Random
    observer: RequestObserver
    clock: Callable[[], float]
    policies: RequestPolicies = field(default_factory=RequestPolicies)
    loaded: LoadedCandidates = field(default_factory=LoadedCandidates)
