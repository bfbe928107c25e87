"""What the director works with: the steps that a configuration decides, and what requests share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from picker.errors import DropReason
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
from picker.outliers.breaker import Answer
from picker.outliers.burst_wait import BurstWait
from picker.pool.inflight import InflightLoad
from picker.pool.policies import NO_REWRITES, RewriteRules
from picker.requestcontrol.bare_requests import NOTHING_SAID, BareRequests
from picker.requestcontrol.candidates import LoadedCandidates
from picker.requestcontrol.observer import NoObserver, RequestObserver
from picker.requestcontrol.parsing import ParserTable
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    SchedulingResult,
    Usage,
)


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


class Ticket(Protocol):
    """A request that flow control has let in, until the request is over."""

    @property
    def queue_seconds(self) -> float:
        """How long it waited."""
        ...

    def left(self, endpoint_key: str) -> None:
        """It counts as under way at this endpoint from now on. Called at most once."""
        ...

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        """It is over, and counts as under way nowhere any more. Called exactly once."""
        ...


class FlowGate(Protocol):
    """Flow control as a request meets it."""

    @property
    def is_open(self) -> bool:
        """Whether a request of any priority would be let in now without waiting."""
        ...

    async def admit(
        self, request: InferenceRequest, evict: Callable[[DropReason], None] | None
    ) -> Ticket:
        """Wait until `request` may go. Does not wait while `is_open`.

        `evict` stops the request while it is under way (None: it cannot be stopped). Raises
        `RefusedError`. May be cancelled; then the request is out of the queue.
        """
        ...


class EndpointVisit(Protocol):
    """One request at one endpoint, as far as it tells of the endpoint's health."""

    def responded(self, answer: Answer, now_seconds: float) -> None:
        """The response has begun. Called at most once."""
        ...

    def ended(self, cause: FinishCause, answer: Answer, now_seconds: float) -> None:
        """The request is over. Called exactly once; `answer` is what is known of the response."""
        ...


class EndpointHealth(Protocol):
    """Remembers which endpoints have failed lately. Times are on the clock of the requests."""

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        """Those that should be sent requests, in their order; never none of some."""
        ...

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        """The one of `candidates` that this request should try out, if any is due for that."""
        ...

    def left(self, endpoint: Endpoint, now_seconds: float, is_bare: bool = False) -> EndpointVisit:
        """A request has left for this endpoint; one that `is_bare` is nothing for an engine."""
        ...


class UnwatchedVisit:
    """A visit of which nothing is learnt."""

    def responded(self, answer: Answer, now_seconds: float) -> None:
        """Ignore."""

    def ended(self, cause: FinishCause, answer: Answer, now_seconds: float) -> None:
        """Ignore."""


class NoHealthMemory:
    """Holds nothing against anyone."""

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        """All."""
        return candidates

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        """None."""
        return None

    def left(self, endpoint: Endpoint, now_seconds: float, is_bare: bool = False) -> EndpointVisit:
        """Any of them."""
        return UnwatchedVisit()


@dataclass(frozen=True, slots=True)
class RequestPipeline:
    """Everything a configuration decides about a request; a reload swaps it as a whole.

    Everything runs in the order given. A producer that has `look_up` is awaited, with its timeout.
    With a `gate` requests wait there for their turn; without one those of negative priority are
    shed while `saturation` says that the pool is full. To requests
    without a body nothing applies but `bare`.
    """

    parsers: ParserTable
    scheduler: RequestScheduler
    producers: tuple[DataProducer | AsyncDataProducer, ...] = ()
    hooks: tuple[PreRequest, ...] = ()
    processors: tuple[RequestProcessor, ...] = ()
    screeners: tuple[Screener, ...] = ()
    admitters: tuple[Admitter, ...] = ()
    saturation: SaturationDetector | None = None
    gate: FlowGate | None = None
    response_heads: tuple[ResponseHeadHook, ...] = ()
    response_progress: tuple[ResponseProgressHook, ...] = ()
    request_ends: tuple[RequestEndHook, ...] = ()
    bare: BareRequests = NOTHING_SAID
    asks_others: bool = field(init=False)  # whether a decision may have to wait for a producer

    def __post_init__(self) -> None:
        asking = any(hasattr(producer, "look_up") for producer in self.producers)
        object.__setattr__(self, "asks_others", asking)


def _never_unsure() -> BurstWait:
    """Without a memory of health nothing is waited for."""
    return BurstWait(lambda: False, 0.0)


def _nobody_waits() -> None:
    """Without flow control nobody is to be told."""


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
    """What requests share beyond the configuration; `clock` is monotonic, in seconds.

    With `seeds_decisions` each decision draws from a random source of its own, so that it can be
    made again. `freed` is told when a request is over that left for an endpoint past the gate: what
    the gate knows of by no ticket. `numbers` tells the requests of a process apart.
    """

    datastore: SnapshotSource
    inflight: InflightLoad
    rng: Random
    observer: RequestObserver = field(default_factory=NoObserver)
    clock: Callable[[], float] = time.monotonic
    policies: RequestPolicies = field(default_factory=RequestPolicies)
    loaded: LoadedCandidates = field(default_factory=LoadedCandidates)
    health: EndpointHealth = field(default_factory=NoHealthMemory)
    settling: BurstWait = field(default_factory=_never_unsure)
    seeds_decisions: bool = False
    freed: Callable[[], None] = _nobody_waits
    numbers: Iterator[int] = field(default_factory=count)
