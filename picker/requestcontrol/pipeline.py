"""The director's inputs: the pipeline of a configuration, and the context that requests share."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from picker.decisions.decision import Decision, Watchers
from picker.decisions.steps import BoundPlugin, PluginSteps
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
from picker.outliers.burst_wait import BurstWait
from picker.outliers.detector import OutlierDetector
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RewriteRules
from picker.requestcontrol.candidates import LoadedCandidates
from picker.requestcontrol.prompt_heads import PromptHeads
from picker.telemetry.spans import RequestTracer
from picker.types import (
    Candidate,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    SchedulingResult,
    Usage,
)

MAX_CACHED_PATHS = 64  # clients choose them
log = logging.getLogger(__name__)


class PoolSnapshot(Protocol):
    @property
    def candidates(self) -> Sequence[Candidate]: ...


class SnapshotSource(Protocol):
    def snapshot(self) -> PoolSnapshot: ...


class RequestScheduler(Protocol):
    """Chooses endpoints for a request; `scheduling.scheduler` in production."""

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
        steps: PluginSteps,
    ) -> SchedulingResult:
        """Choose endpoints, and append the calls of plugins to `steps`. Raises `RefusedError`."""


class DecisionRecorder(Protocol):
    """Records the inputs of decisions; must not raise."""

    @property
    def is_recording(self) -> bool:
        """True if the recorder wants calls, and each attempt must draw from a seed."""

    def scheduling(self, decision: Decision) -> None:
        """Called before each attempt: findings may be live views, which the decision changes."""

    def scheduled(self, decision: Decision, said: SchedulingResult | Exception) -> None: ...

    def finished(self, decision: Decision) -> None:
        """Called at the end of a request whose hooks were called."""


class ObjectiveSource(Protocol):
    def priority(self, objective: str) -> int | None:
        """Return the priority of `objective`; None if there is no such objective or it has none."""


class RewriteSource(Protocol):
    @property
    def rules(self) -> RewriteRules | None: ...


class Ticket(Protocol):
    """The admission of a request by flow control, until the request is over."""

    @property
    def queue_seconds(self) -> float: ...

    def left(self, endpoint_key: str) -> None:
        """Count the request as under way at this endpoint. Called at most once."""

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        """End the request. Called exactly once."""


class FlowGate(Protocol):
    @property
    def is_open(self) -> bool:
        """True if a request of any priority would be admitted now without waiting."""

    async def admit(
        self, request: InferenceRequest, evict: Callable[[DropReason], None] | None
    ) -> Ticket:
        """Wait until `request` may go. Does not wait while `is_open`. Raises `RefusedError`.

        `evict` stops the request while it is under way. Cancelling this call dequeues the request.
        """

    def pool_changed(self) -> None:
        """Called when a request without a ticket is over, and the load of endpoints has changed."""


@runtime_checkable
class BodylessFilter(Protocol):
    """A filter that needs only headers."""

    def narrow(
        self, headers: Mapping[str, str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]: ...


@runtime_checkable
class BodylessResponseHook(Protocol):
    """Sets headers on the responses to requests without a body."""

    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str] | None: ...


class ParserTable:
    """Parsers by the path suffixes they claim.

    A claim matches a path that ends with it, after a `/` or, as in the name of a gRPC service,
    after a `.`. The longest matching claim wins; of equal claims the parser configured first. A
    parser without claims takes all other paths.
    """

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self.parsers = tuple(parsers)
        self._fallback = next((parser for parser in parsers if not parser.claims), None)
        end = len(parsers) if self._fallback is None else parsers.index(self._fallback) + 1
        used = parsers[:end]
        for parser in parsers[end:]:
            log.warning(
                "the parser %s is unused: one before it takes every path", type(parser).__name__
            )
        claims = [(claim.strip("/"), parser) for parser in used for claim in parser.claims]
        claims.sort(key=lambda pair: -len(pair[0]))
        self._claims = tuple(((f"/{claim}", f".{claim}"), parser) for claim, parser in claims)
        # Returns the parser of a path; raises `RefusedError` (400) if there is none.
        self.select: Callable[[str], Parser] = lru_cache(MAX_CACHED_PATHS)(self._select)

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


class BodylessRequests(msgspec.Struct, frozen=True):
    filters: tuple[BodylessFilter, ...] = ()
    heads: tuple[BodylessResponseHook, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPipeline:
    """The plugins of a configuration, for the director; a reload replaces all of them at once.

    Plugins run in the order given. With a `gate` requests wait there for their turn; without one
    those of negative priority are shed while `saturation` reports that the pool is full. With
    `propagates_priority` engines receive the priorities of requests.
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
    propagates_priority: bool = False
    asks_others: bool = field(init=False)  # whether a decision may have to wait for a producer
    has_ends: bool = field(init=False)  # whether anything is called when a request is over

    def __post_init__(self) -> None:
        asking = any(hasattr(producer.plugin, "look_up") for producer in self.producers)
        object.__setattr__(self, "asks_others", asking)
        has_ends = bool(self.request_ends) or self.recorder is not None
        object.__setattr__(self, "has_ends", has_ends)


@dataclass(frozen=True, slots=True)
class RequestPolicies:
    """Policies that come from flags and Kubernetes objects, not from the configuration file."""

    objectives: ObjectiveSource | None = None
    rewrites: RewriteSource | None = None
    tracer: RequestTracer | None = None
    emit_endpoint_scores: bool = False
    ignore_subset_hint: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts that all requests share besides the configuration.

    `clock` is monotonic, in seconds. Without `health` no endpoint is ejected; without `burst_wait`
    no request waits for the answers to others. `numbers` are unique within a process.
    """

    datastore: SnapshotSource
    inflight: InflightLoad
    rng: Random
    watchers: Watchers = field(default_factory=Watchers)
    clock: Callable[[], float] = time.monotonic
    policies: RequestPolicies = field(default_factory=RequestPolicies)
    loaded: LoadedCandidates = field(default_factory=LoadedCandidates)
    health: OutlierDetector | None = None
    burst_wait: BurstWait | None = None
    numbers: Iterator[int] = field(default_factory=count)
    prompt_heads: PromptHeads = field(default_factory=PromptHeads)
