"""Every contract that a plugin can implement, in one file.

A plugin is a plain object; it may implement several contracts. All methods but `look_up` and
`flush` are synchronous, take all their inputs as arguments, and neither read a clock nor draw from
a global random source. Scores are in [0, 1]; higher is better. `attributes` holds the findings of
data producers for this one decision.
"""

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
    """Parses the bodies of some paths."""

    claims: tuple[str, ...]  # path suffixes; empty: every path that no other parser claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        """Decode `body`. Raises a `RefusedError` (400) that names the invalid field."""


@runtime_checkable
class DataProducer(Protocol):
    """Derives findings from request and candidates before scheduling."""

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Write findings into `attributes`; return the request, or an enriched copy."""


@runtime_checkable
class AsyncDataProducer(Protocol):
    """A data producer that asks another server, through `Services`. Runs in order with the others.

    A failure or an answer after `timeout_seconds` ends the production of findings, never the
    request.
    """

    timeout_seconds: float

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Like `DataProducer.produce`, but awaited."""


@runtime_checkable
class RequestProcessor(Protocol):
    """Reads a request's headers before any decision about it."""

    def process(self, request: InferenceRequest) -> InferenceRequest:
        """Return the request, or an enriched copy. Raises `RefusedError`."""


@runtime_checkable
class Screener(Protocol):
    """Narrows the candidates of all profiles, before producers run."""

    def screen(self, request: InferenceRequest, candidates: Candidates, rng: Random) -> Candidates:
        """Return the candidates that may serve; the results of all screeners are intersected."""


@runtime_checkable
class Admitter(Protocol):
    """May refuse a request after the producers ran."""

    def admit(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> None:
        """Raise `RefusedError` if the request may not be scheduled."""


@runtime_checkable
class SaturationDetector(Protocol):
    """Measures how full the pool is."""

    def saturation(
        self, candidates: Candidates, attributes: Attributes, now_seconds: float
    ) -> float:
        """Return 0 for an idle pool, 1 and above for a full one; an empty pool is full."""


@runtime_checkable
class Decider(Protocol):
    """Decides whether a stage of a disaggregated request runs on its own endpoint."""

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        """Return whether to run the stage; `picked` is the previous stage's endpoint, if any."""


@runtime_checkable
class UsesPlugins(Protocol):
    """Needs other plugins of the configuration."""

    @property
    def references(self) -> Mapping[str, str]:
        """The names of the needed plugins, by the parameters that hold them."""

    def connect(self, plugins: Mapping[str, object]) -> None:
        """Receive the named plugins, once all exist. Raises `ValueError` for a wrong one."""


@runtime_checkable
class ResponseReader(Protocol):
    """Reads the usage from one response, whose pieces it is fed in order."""

    @property
    def usage(self) -> Usage | None:
        """The usage reported so far, if any."""

    def feed(self, data: bytes, is_last: bool) -> None:
        """Take a piece of the body, cut anywhere. Never raises for malformed content."""


@runtime_checkable
class ReadsResponses(Protocol):
    """A parser that also reads the responses to its requests."""

    def response_reader(self, body: ParsedBody, content_type: str) -> ResponseReader:
        """Create a reader for the response to a request with this body."""


@runtime_checkable
class ProducesData(Protocol):
    """Declares the findings that its `produce` writes; `ConsumesData` can require them."""

    @property
    def produces(self) -> tuple[DataKey[Any], ...]:
        """The keys that it writes."""


@runtime_checkable
class ConsumesData(Protocol):
    """Needs findings of data producers; missing producers are created when the picker starts."""

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        """The keys that it reads; those of a producer are written before it runs."""


@runtime_checkable
class MayConsumeData(Protocol):
    """Uses findings if they exist; no producer is created for them."""

    @property
    def may_consume(self) -> tuple[DataKey[Any], ...]:
        """The keys that it reads if they were produced."""


@runtime_checkable
class Filter(Protocol):
    """Narrows the candidates of a profile."""

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """Return the suitable candidates in the order given; the request is refused if none is."""


@runtime_checkable
class Scorer(Protocol):
    """Rates the candidates of a profile."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        """Return a score in [0, 1] for each candidate, in the order given."""


@runtime_checkable
class PickerPlugin(Protocol):
    """Chooses among scored candidates."""

    def pick(self, scored: Sequence[ScoredEndpoint], rng: Random) -> Sequence[ScoredEndpoint]:
        """Return the choice, best first, empty only for an empty input. `rng` breaks ties."""


@runtime_checkable
class ProfileHandler(Protocol):
    """Selects the scheduling profiles that run, and the primary result."""

    @property
    def max_profiles(self) -> int | None:
        """The largest number of profiles that it supports; None: any number."""

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        """Name the profiles to run next, none when done; the result of a refused one is None."""

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """Combine the results. Raises `RefusedError` if the primary profile has none."""


@runtime_checkable
class PreRequest(Protocol):
    """Called with each decision right before the request leaves for its endpoint."""

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """Record the decision; return headers for the request, if any. Raises `RefusedError` to
        refuse it after all.
        """


class Flight(msgspec.Struct, frozen=True):
    """A request that has left for its endpoint, with the decision and the findings of producers."""

    request: InferenceRequest
    result: SchedulingResult
    attributes: Attributes


@runtime_checkable
class ResponseHeadHook(Protocol):
    """Called when the response to a routed request begins."""

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str] | None:
        """Return headers for the response, if any."""


@runtime_checkable
class ResponseProgressHook(Protocol):
    """Called with the pieces of a response, where the proxy shows bodies."""

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> Metadata | None:
        """Return metadata for the proxy, if any; only that of the last piece is sent."""


@runtime_checkable
class RequestEndHook(Protocol):
    """Called exactly once, at the end of each request that `PreRequest` hooks were called with,
    even if one of them refused it.
    """

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """Release the state of the request. `usage` is that of its response, if reported."""


@runtime_checkable
class BackgroundFlush(Protocol):
    """Sends data to another server in batches, outside of requests.

    The picker awaits `flush` every `flush_interval_seconds`, one call at a time, and at its end.
    """

    flush_interval_seconds: float

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        """Send the batch; handle all failures of the other server. `now_seconds` is on the clock of
        the hooks, `unix_seconds` the time of day at the same moment.
        """


@runtime_checkable
class EndpointObserver(Protocol):
    """Called when endpoints leave the pool or restart, so that state about them can be dropped."""

    def endpoint_removed(self, key: str) -> None:
        """Drop all state about the endpoint `key`."""


@dataclass(frozen=True, slots=True)
class KvEventFeed:
    """A consumer's subscription to the topics of KV events that begin with `topic_prefix`.

    Engines connect to `bind_address`, a ZMQ address, or the picker connects to each endpoint.
    """

    bind_address: str | None = None
    topic_prefix: str = ""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The ZMQ addresses of an endpoint's engine; `replay_address` is None if it cannot replay."""

    address: str
    replay_address: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedKvEvent:
    """An event that was skipped, with the reason as a label and in words."""

    reason: str
    text: str


@runtime_checkable
class KvEventConsumer(Protocol):
    """Consumes the KV events of engines; those of one engine come in order."""

    @property
    def kv_event_feed(self) -> KvEventFeed:
        """The subscription, constant for the life of the plugin."""

    def kv_event_source(self, endpoint: Endpoint) -> KvEventSource | None:
        """Return the addresses to connect to for this endpoint; None: skip it."""

    def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
        """Process a message from endpoint `key`; return the events that were skipped. Raises
        `PickerError` for a malformed message, of which nothing is then processed.
        """

    def kv_events_lost(self, key: str) -> None:
        """Discard all KV events of endpoint `key`."""


@runtime_checkable
class NamesProfiles(Protocol):
    """Names profiles in parameters. Both properties map parameters to profiles."""

    @property
    def required_profiles(self) -> Mapping[str, str]:
        """The profiles without which no request can be scheduled."""

    @property
    def optional_profiles(self) -> Mapping[str, str]:
        """The profiles that were named explicitly; without one, its stage is skipped."""


@runtime_checkable
class RevisionGate(Protocol):
    """Draws one of the revisions of a rollout for each request."""

    @property
    def gating_mode(self) -> str:
        """The method of drawing, as the configuration names it."""

    def revision_shares(self, candidates: Candidates) -> Mapping[str, float]:
        """Return the probability of each revision; empty if none is complete."""

    def unmatched_selectors(
        self, request: InferenceRequest, candidates: Candidates
    ) -> Sequence[str]:
        """Name the strict header selectors that select none of `candidates`."""
