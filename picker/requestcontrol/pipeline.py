"""What the director works with: the steps that a configuration decides, and what requests share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from picker.decisions.decision import Decision, Watchers
from picker.decisions.steps import BoundPlugin, PluginStep
from picker.errors import DropReason, bad_request
from picker.framework.attributes import Attributes
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    Parser,
    PreRequest,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Screener,
)
from picker.outliers.breaker import Answer
from picker.outliers.burst_wait import BurstWait
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RewriteRules
from picker.requestcontrol.candidates import LoadedCandidates
from picker.telemetry.spans import RequestTracer
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    SchedulingResult,
    Usage,
)

MAX_REMEMBERED = 64  # paths, which clients choose
log = logging.getLogger(__name__)


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
        steps: list[PluginStep],
    ) -> SchedulingResult:
        """The decision; what plugins did is added to `steps`. Raises `RefusedError`."""
        ...


class DecisionRecorder(Protocol):
    """Writes down what decisions are made of; must not raise."""

    @property
    def is_recording(self) -> bool:
        """Whether it is worth to call it, and to draw from seeds."""
        ...

    def scheduling(self, decision: Decision) -> None:
        """The scheduler is about to be asked: what producers found may be live views, and the
        decision itself adds to them.
        """
        ...

    def scheduled(self, decision: Decision, said: SchedulingResult | Exception) -> None:
        """The scheduler has answered, or failed."""
        ...

    def finished(self, decision: Decision) -> None:
        """A request that hooks were told of is over."""
        ...


class ObjectiveSource(Protocol):
    """Knows what the names of objectives stand for."""

    def priority(self, objective: str) -> int | None:
        """Its priority; None: there is no such objective, or it names no priority."""
        ...


class RewriteSource(Protocol):
    """Knows the rules by which models are rewritten."""

    @property
    def rules(self) -> RewriteRules | None:
        """The rules now; None: there are none."""
        ...


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

    def pool_changed(self) -> None:
        """What is under way at endpoints has changed: a request without a ticket is over."""
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
    """Remembers which endpoints have failed lately. Times are on the clock of the requests.

    While it holds none back, all are usable, no probe is due and nothing is unsure.
    """

    @property
    def held(self) -> Collection[str]:
        """The keys of the endpoints that it holds back."""
        ...

    def is_unsure(self, now_seconds: float) -> bool:
        """Whether a burst has just filled the pool and no answer has arrived yet."""
        ...

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        """Those that should be sent requests, in their order; never none of some."""
        ...

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        """The one of `candidates` that this request should try out, if any is due for that."""
        ...

    def left(
        self, endpoint: Endpoint, now_seconds: float, is_bodyless: bool = False, /
    ) -> EndpointVisit:
        """A request has left for this endpoint; one that `is_bodyless` is nothing for an engine."""
        ...


@runtime_checkable
class BodylessFilter(Protocol):
    """A filter that goes by headers alone."""

    def narrow(
        self, headers: Mapping[str, str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """The candidates that may serve."""
        ...


@runtime_checkable
class BodylessResponseHook(Protocol):
    """Told of the beginning of a response to whichever request."""

    def bare_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        """Headers to set on the response, if any."""
        ...


class ParserTable:
    """Parsers by the path suffixes they claim.

    A claim matches a path that ends with it, from a `/` on, or from a `.`, as a gRPC service's
    package ends. The longest matching claim wins; between equal claims the parser configured first.
    A parser without claims takes what nobody else does, and parsers configured after it are unused,
    which is logged.
    """

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self.parsers = tuple(parsers)
        used = _until_fallback(parsers)
        for parser in parsers[len(used) :]:
            log.warning(
                "the parser %s is unused: one before it takes every path", type(parser).__name__
            )
        claims = [(claim.strip("/"), parser) for parser in used for claim in parser.claims]
        claims.sort(key=lambda pair: -len(pair[0]))
        self._claims = tuple(((f"/{claim}", f".{claim}"), parser) for claim, parser in claims)
        self._fallback = next((parser for parser in used if not parser.claims), None)
        # The parser of a path; raises `RefusedError` (400) when nobody takes it.
        self.select: Callable[[str], Parser] = lru_cache(MAX_REMEMBERED)(self._select)

    def _select(self, path: str) -> Parser:
        trimmed = path.rstrip("/")
        if not trimmed.startswith("/"):
            trimmed = f"/{trimmed}"
        for endings, parser in self._claims:
            if trimmed.endswith(endings):
                return parser
        if self._fallback is None:
            raise bad_request(f"no parser is configured for the path '{path}'")
        return self._fallback


def _until_fallback(parsers: Sequence[Parser]) -> Sequence[Parser]:
    """Parsers up to the first one without claims."""
    for index, parser in enumerate(parsers):
        if not parser.claims:
            return parsers[: index + 1]
    return parsers


class BodylessRequests(msgspec.Struct, frozen=True):
    """What a configuration says of requests without a body.

    Nothing is known about such a request but its headers, so the scheduler is not asked, and few
    plugins have anything to say: filters that go by headers, and hooks on responses.
    """

    filters: tuple[BodylessFilter, ...] = ()
    heads: tuple[BodylessResponseHook, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPipeline:
    """Everything a configuration decides about a request; a reload swaps it as a whole.

    Everything runs in the order given. A producer that has `look_up` is awaited, with its timeout.
    With a `gate` requests wait there for their turn; without one those of negative priority are
    shed while `saturation` says that the pool is full. To requests without a body nothing applies
    but `bodyless`.
    """

    parsers: ParserTable
    scheduler: BoundPlugin[RequestScheduler]
    producers: tuple[BoundPlugin[DataProducer | AsyncDataProducer], ...] = ()
    hooks: tuple[BoundPlugin[PreRequest], ...] = ()
    processors: tuple[BoundPlugin[RequestProcessor], ...] = ()
    screeners: tuple[BoundPlugin[Screener], ...] = ()
    admitters: tuple[BoundPlugin[Admitter], ...] = ()
    saturation: SaturationDetector | None = None
    gate: FlowGate | None = None
    response_heads: tuple[BoundPlugin[ResponseHeadHook], ...] = ()
    response_progress: tuple[BoundPlugin[ResponseProgressHook], ...] = ()
    request_ends: tuple[BoundPlugin[RequestEndHook], ...] = ()
    bodyless: BodylessRequests = field(default_factory=BodylessRequests)
    recorder: DecisionRecorder | None = None
    asks_others: bool = field(init=False)  # whether a decision may have to wait for a producer
    has_ends: bool = field(init=False)  # whether anything is called when a request is over

    def __post_init__(self) -> None:
        asking = any(hasattr(producer.plugin, "look_up") for producer in self.producers)
        object.__setattr__(self, "asks_others", asking)
        has_ends = bool(self.request_ends) or self.recorder is not None
        object.__setattr__(self, "has_ends", has_ends)


@dataclass(frozen=True, slots=True)
class RequestPolicies:
    """What is decided about requests outside the configuration file.

    With `emit_endpoint_scores` the proxy is told every candidate's score; with
    `ignore_subset_hint` the whole pool may serve whatever the proxy says.
    """

    objectives: ObjectiveSource | None = None
    rewrites: RewriteSource | None = None
    tracer: RequestTracer | None = None
    emit_endpoint_scores: bool = False
    ignore_subset_hint: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What requests share beyond the configuration; `clock` is monotonic, in seconds.

    Without `health` nothing is held against endpoints; without `settling` none of their answers is
    waited for. `numbers` tells the requests of a process apart.
    """

    datastore: SnapshotSource
    inflight: InflightLoad
    rng: Random
    watchers: Watchers = field(default_factory=Watchers)
    clock: Callable[[], float] = time.monotonic
    policies: RequestPolicies = field(default_factory=RequestPolicies)
    loaded: LoadedCandidates = field(default_factory=LoadedCandidates)
    health: EndpointHealth | None = None
    settling: BurstWait | None = None
    numbers: Iterator[int] = field(default_factory=count)
