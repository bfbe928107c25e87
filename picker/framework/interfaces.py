"""Every contract a plugin can fulfil, readable in one sitting.

A plugin is a plain object; it may fulfil several contracts. All methods are synchronous, take
everything they need as arguments, and neither read a clock nor draw from a global random source.
Scores lie in [0, 1]; higher is better. `attributes` carries what data producers found out for this
one decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

import msgspec

from picker.framework.attributes import Attributes, DataKey
from picker.types import (
    Candidate,
    Candidates,
    Endpoint,
    FinishCause,
    InferenceRequest,
    Metadata,
    ParsedBody,
    ProfileResult,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
    ScoredEndpoint,
    Usage,
)


@runtime_checkable
class Parser(Protocol):
    """Understands the bodies of some paths."""

    claims: tuple[str, ...]  # path suffixes; empty: takes every path that no other parser claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Decode `body`. Raises `RefusedError` (400) naming the field that is wrong."""


@runtime_checkable
class DataProducer(Protocol):
    """Finds something out about request × candidates before scheduling."""

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Write findings into `attributes`; return the request, possibly enriched
        (`dataclasses.replace`).
        """


@runtime_checkable
class AsyncDataProducer(Protocol):
    """A data producer that has to ask another server. Runs in order with the others.

    It asks through `Services`; whatever goes wrong or takes longer than `timeout_seconds` ends the
    finding out, never the request.
    """

    timeout_seconds: float

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """As `DataProducer.produce`."""


@runtime_checkable
class RequestProcessor(Protocol):
    """Looks at a request's headers before anything is decided about it."""

    def process(self, request: InferenceRequest) -> InferenceRequest:
        """The request, possibly enriched. Raises `RefusedError`."""


@runtime_checkable
class Screener(Protocol):
    """Narrows the candidates of all profiles, before producers look at them."""

    def screen(self, request: InferenceRequest, candidates: Candidates, rng: Random) -> Candidates:
        """Those that may serve. Every screener sees all; the results are intersected."""


@runtime_checkable
class Admitter(Protocol):
    """May refuse a request once producers have looked at it."""

    def admit(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> None:
        """Raises `RefusedError` to refuse."""


@runtime_checkable
class SaturationDetector(Protocol):
    """Says how full the pool is."""

    def saturation(
        self, candidates: Candidates, attributes: Attributes, now_seconds: float
    ) -> float:
        """0 is idle, 1 and above is full; no candidates are full."""


@runtime_checkable
class Decider(Protocol):
    """Decides whether a stage of a disaggregated request is worth its profile."""

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        """Whether to run it; `picked` is the endpoint of the stage before, if there was one."""


@runtime_checkable
class UsesPlugins(Protocol):
    """Needs other plugins of the configuration."""

    @property
    def references(self) -> Mapping[str, str]:
        """Parameter name → the plugin that it names."""

    def connect(self, plugins: Mapping[str, object]) -> None:
        """The named plugins, by name; called once, when all plugins exist. Raises `ValueError` for
        one of the wrong kind.
        """


@runtime_checkable
class ResponseReader(Protocol):
    """Reads what one response says about usage. One object a response, fed in order."""

    @property
    def usage(self) -> Usage | None:
        """What was said so far; None: nothing."""

    def feed(self, data: bytes, is_last: bool) -> None:
        """Take a piece of the body, cut anywhere. Never raises for what a server may send."""


@runtime_checkable
class ReadsResponses(Protocol):
    """A parser that understands the responses to its requests as well."""

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        """A reader for the response to a request with this body."""


@runtime_checkable
class ProducesData(Protocol):
    """Says what its `produce` writes. Names the findings that `ConsumesData` can ask for."""

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        """The keys it writes."""


@runtime_checkable
class ConsumesData(Protocol):
    """Needs findings of data producers; missing producers are created when the picker starts."""

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The keys it reads; for a producer, those that must be written before it runs."""


@runtime_checkable
class MayConsumeData(Protocol):
    """Makes use of findings where there are any; nothing is created to make them."""

    @property
    def may_consume(self) -> tuple[DataKey[Any], ...]:
        """The keys it reads when they were produced."""


@runtime_checkable
class Filter(Protocol):
    """Narrows the candidates of a profile."""

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """Return the candidates that may serve, in the order given; none refuses the request."""


@runtime_checkable
class Scorer(Protocol):
    """Rates candidates."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        """One score in [0, 1] per candidate, in the order given."""


@runtime_checkable
class PickerPlugin(Protocol):
    """Chooses among scored candidates."""

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """The chosen ones, best first; never empty for a non-empty input. `rng` breaks ties."""


@runtime_checkable
class ProfileHandler(Protocol):
    """Decides which scheduling profiles run and which result is primary."""

    @property
    def max_profiles(self) -> int | None:
        """How many profiles it can work with; None: any number."""

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        """Names of the profiles to run next; empty when done. `results` has None for a profile that
        found nothing.
        """

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """Combine the results. Raises `RefusedError` when the primary profile found nothing."""


@runtime_checkable
class PreRequest(Protocol):
    """Called with each decision right before the request leaves for its endpoint."""

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """Record the decision (a prefix index learns here); headers to set on the request, if any.

        Raises `RefusedError` to refuse it after all.
        """


class Flight(msgspec.Struct, frozen=True):
    """A request that has left for its endpoint, with the decision and what producers found."""

    request: InferenceRequest
    result: SchedulingResult
    attributes: Attributes


@runtime_checkable
class ResponseHeadHook(Protocol):
    """Called when the response to a routed request begins."""

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """Headers to set on the response, if any."""


@runtime_checkable
class ResponseProgressHook(Protocol):
    """Called with the pieces of a response, where the proxy shows bodies."""

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        """Metadata for the proxy, if any; it is sent with the last piece only."""


@runtime_checkable
class RequestEndHook(Protocol):
    """Called at the end of each request that `PreRequest` hooks were called with, exactly once.

    Whatever ended it: also when one of those hooks refused it.
    """

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """Release what the request held. `usage` is what its response said, if anything."""


@runtime_checkable
class BackgroundFlush(Protocol):
    """Gathers what is sent to another server in batches, beside the requests.

    The picker awaits `flush` every `flush_interval_seconds`, one call at a time, and once more
    before it ends.
    """

    flush_interval_seconds: float

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        """Hand over what was gathered. `now_seconds` is on the clock of the hooks, `unix_seconds`
        the time of day at the same moment. Whatever goes wrong with the other server is dealt
        with here.
        """


@runtime_checkable
class EndpointObserver(Protocol):
    """Called when endpoints leave the pool or restart, so that state about them can be dropped."""

    def endpoint_removed(self, key: str) -> None:
        """Forget everything about the endpoint `key`."""


@dataclass(frozen=True, slots=True)
class KvEventFeed:
    """How a consumer of KV events wants to be fed.

    Either the engines connect to `bind_address` (a ZMQ address), or, where that is None, the picker
    connects to each endpoint. Only topics that begin with `topic_prefix` are wanted.
    """

    bind_address: str | None = None
    topic_prefix: str = ""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The ZMQ addresses of one endpoint's engine; None: nothing can be asked for again."""

    address: str
    replay_address: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedKvEvent:
    """An event that was left out of its message: for which of a few reasons, and in words."""

    reason: str
    text: str


@runtime_checkable
class KvEventConsumer(Protocol):
    """Learns from what engines say about their KV caches; `kvevents` does the listening.

    Calls for one endpoint come in the order in which its engine spoke.
    """

    @property
    def kv_event_feed(self) -> KvEventFeed:
        """Where to listen; the same for the life of the plugin."""

    def kv_event_source(self, endpoint: Endpoint) -> KvEventSource | None:
        """Where to connect to hear this endpoint; None: it is not wanted."""

    def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
        """Take in what endpoint `key` sent; returns the events that were left out of it.

        Raises `PickerError` for a message that is not one; then nothing of it was taken in.
        """

    def kv_events_lost(self, key: str) -> None:
        """What endpoint `key` said so far does not hold any more: forget it."""


@runtime_checkable
class NamesProfiles(Protocol):
    """Asks for profiles by name; both mappings are parameter → the profile that it names."""

    @property
    def required_profiles(self) -> Mapping[str, str]:
        """Those without which nothing is scheduled: a configuration has to have them."""

    @property
    def optional_profiles(self) -> Mapping[str, str]:
        """Those that were named on purpose and without which something is left out."""


@runtime_checkable
class RevisionGate(Protocol):
    """Draws one of the revisions of a rollout for each request."""

    @property
    def gating_mode(self) -> str:
        """How it draws, as the configuration calls it."""

    def revision_shares(self, candidates: Candidates) -> Mapping[str, float]:
        """The chance of each revision that could be drawn; empty when none is complete."""

    def unmatched_selectors(
        self, request: InferenceRequest, candidates: Candidates
    ) -> Sequence[str]:
        """The strict header selectors, by name, that select none of `candidates`."""
