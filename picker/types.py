"""The values every room of the picker shares. All frozen; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import eq
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, overload

import msgspec

_EMPTY: Mapping[str, Any] = MappingProxyType({})
DEFAULT_FAIRNESS_ID = "default-flow"
BYTES_PER_TOKEN = 4


class Endpoint(msgspec.Struct, frozen=True):
    """One serving address of the pool: who it is, never how it is doing.

    `key` is "namespace/name" and is the identity used by every map in the picker; it is made once,
    because every decision asks for it many times. `rank_index` tells the endpoints of one pod apart
    that serve its data-parallel ranks, one port each. `metrics_host_port` is where its metrics page
    is when that is not its own address, `node_address` that of the machine it runs on, where known.
    `incarnation` is of what runs at the address, where that is known: another one, at the same
    address and under the same name, is another server with an empty cache.
    """

    name: str
    address: str
    port: int
    namespace: str = "default"
    labels: Mapping[str, str] = _EMPTY
    rank_index: int = 0
    metrics_host_port: str | None = None
    node_address: str | None = None
    incarnation: str = ""
    key: str = ""

    def is_same_server(self, other: Endpoint) -> bool:
        """Whether what is known of one, its metrics and its cache, is true of the other."""
        return self.host_port == other.host_port and self.incarnation == other.incarnation

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "key", f"{self.namespace}/{self.name}")

    @property
    def host_port(self) -> str:
        """`ip:port`, IPv6 in brackets; the form Envoy expects in the destination header."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


class ServedTotals(msgspec.Struct, frozen=True, gc=False):
    """What an endpoint has served since its start, as of `read_at_seconds`.

    `ttft_counts` are requests by the time to their first token: one for each of `ttft_edges`, in
    seconds and ascending, that took longer than the edge before and at most that one, and one for
    those that took longer than all. Both are empty where the engine has no such histogram.
    """

    read_at_seconds: float
    generated_tokens: float | None = None
    ttft_edges: tuple[float, ...] = ()
    ttft_counts: tuple[float, ...] = ()


class Percentiles(msgspec.Struct, frozen=True):
    """Of times, in seconds, by the edges of a histogram: linear between two of them, and the
    highest edge for what is beyond it.
    """

    p50: float
    p95: float
    p99: float


class EndpointMetrics(msgspec.Struct, frozen=True):
    """What one scrape of an endpoint said. `updated_at_seconds` is on the monotonic clock of the
    caller.

    A load signal is None where the page does not report it; then it is unknown by itself, and the
    others count. `active_models` and `waiting_models` are the LoRA adapters that run and wait
    there, at most `max_active_models` at a time (None: the endpoint does not say). The next scrape
    was meant to follow after `interval_seconds`: an idle pool is asked less often, so a scrape is
    late when it is older than that and what one tolerates. `served` is read once a second at most,
    for people.
    """

    waiting_requests: int | None = 0
    running_requests: int | None = 0
    kv_cache_usage: float | None = 0.0  # 0..1
    block_size_tokens: int | None = None
    num_kv_blocks: int | None = None
    process_start_time_seconds: float | None = None
    active_models: frozenset[str] = frozenset()
    waiting_models: frozenset[str] = frozenset()
    max_active_models: int | None = None
    updated_at_seconds: float = 0.0
    interval_seconds: float = 0.0
    served: ServedTotals | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An endpoint as one scheduling decision sees it: identity, last metrics, own load.

    Nothing that it refers to refers to candidates, so the garbage collector need not look at them:
    the records of decisions keep hundreds of thousands.

    `metrics` is None while the load is unknown: never scraped, or scrapes went stale; then
    `last_metrics` is what was known last. `attributes` are findings of data-layer extractors about
    this endpoint, by "Type/producer".
    """

    endpoint: Endpoint
    metrics: EndpointMetrics | None = None
    inflight_requests: int = 0
    last_metrics: EndpointMetrics | None = None
    attributes: Mapping[str, Any] = _EMPTY

    @property
    def key(self) -> str:
        """Identity within the pool."""
        return self.endpoint.key


# In the order of the pool, unless a filter or a screener says otherwise.
Candidates: TypeAlias = Sequence[Candidate]


class Api(Enum):
    """Which API a request speaks; chosen from its path."""

    CHAT_COMPLETIONS = "chat/completions"
    CHAT_BATCH = "chat/completions/batch"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    RESPONSES = "responses"
    CONVERSATIONS = "conversations"
    IMAGES = "images/generations"
    MESSAGES = "messages"
    GENERATE = "generate"
    VLLM_GRPC = "vllm-grpc"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class MultiModalFeature:
    """An image, video or audio item in a prompt: `length` tokens from `offset`.

    `content_hash` names its content.
    """

    modality: str
    content_hash: str
    offset: int
    length: int


class ParsedBody(msgspec.Struct, frozen=True):
    """A request body after its parser.

    `payload` is the decoded JSON object, or None when the parser keeps the body raw; of a request
    with text that names no model (vLLM's gRPC, SGLang's generate) it is `{"prompt": text}`. `model`
    is "" when the body names none, which leaves the choice to the endpoint. `can_rewrite` says that
    the model stands in `payload["model"]` and may be replaced there. `prompts` holds real token
    ids, packed as little-endian uint32, where the request carries them. `skip_response` asks for a
    response that the picker does not look at.
    """

    api: Api
    model: str = ""
    stream: bool = False
    payload: Mapping[str, Any] | None = None
    max_output_tokens: int | None = None
    cache_salt: str = ""
    can_rewrite: bool = True
    prompts: tuple[bytes, ...] = ()
    features: tuple[tuple[MultiModalFeature, ...], ...] = ()
    skip_response: bool = False


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request on its way through a decision.

    `incoming_model` is what the client asked for, `target_model` what the endpoint will be asked
    for. `prompts` holds, per prompt, its tokens packed as little-endian uint32 (see
    `producers/token_producer`), `features` its multi-modal items. `objective` is the name that the
    client asked for, `priority` what it stands for (0 when nobody knows it; below 0 may be shed).
    `received_at_seconds` is on the monotonic clock that all plugins are given times of.
    `size_bytes` is the body's; `held_bytes` all that is held of a request that waits (0: it does
    not).
    """

    request_id: str
    headers: Mapping[str, str]
    body: ParsedBody
    incoming_model: str
    target_model: str
    size_bytes: int = 0
    prompts: tuple[bytes, ...] = ()
    features: tuple[tuple[MultiModalFeature, ...], ...] = ()
    objective: str = ""
    priority: int = 0
    fairness_id: str = DEFAULT_FAIRNESS_ID
    received_at_seconds: float = 0.0
    held_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts; 0 while they are unknown."""
        return sum(map(len, self.prompts)) // BYTES_PER_TOKEN


class ScoredEndpoint(msgspec.Struct, frozen=True):
    """A candidate with its weighted total score within one profile."""

    candidate: Candidate
    score: float


class ScoredCandidates(Sequence[ScoredEndpoint]):
    """Candidates with their totals, in two sequences of equal length that nobody changes.

    An element is made when it is asked for: a decision over a thousand candidates is kept for as
    long as its request runs, and a thousand objects for each would be most of the memory.
    """

    __slots__ = ("candidates", "totals")

    def __init__(self, candidates: Candidates, totals: Sequence[float]) -> None:
        self.candidates = candidates
        self.totals = totals

    def __len__(self) -> int:
        return len(self.totals)

    @overload
    def __getitem__(self, index: int) -> ScoredEndpoint: ...

    @overload
    def __getitem__(self, index: slice) -> ScoredCandidates: ...

    def __getitem__(self, index: int | slice) -> ScoredEndpoint | ScoredCandidates:
        if isinstance(index, slice):
            return ScoredCandidates(self.candidates[index], self.totals[index])
        return ScoredEndpoint(self.candidates[index], self.totals[index])

    def __iter__(self) -> Iterator[ScoredEndpoint]:
        return map(ScoredEndpoint, self.candidates, self.totals)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"ScoredCandidates({list(self)})"


class ProfileResult(msgspec.Struct, frozen=True):
    """Outcome of one scheduling profile: the picked endpoints, best first, and every candidate's
    total.
    """

    picked: tuple[ScoredEndpoint, ...]
    scored: Sequence[ScoredEndpoint] = ()


class SchedulingResult(msgspec.Struct, frozen=True):
    """Outcome of a decision. `endpoints` is the primary profile's ordered fallback list, never
    empty.

    `set_headers` are the profile handler's own headers for the request. An endpoint in `endpoints`
    may differ from the picked candidate's in its port.
    """

    endpoints: tuple[Endpoint, ...]
    primary_profile: str
    profiles: Mapping[str, ProfileResult] = _EMPTY
    set_headers: Mapping[str, str] = _EMPTY


class RawRequest(msgspec.Struct, frozen=True):
    """A complete HTTP request as the proxy handed it over; header names are lower case."""

    headers: Mapping[str, str]
    body: bytes | None  # None: the request has no body
    subset_hint: Sequence[str] | None = None  # None: the whole pool may serve


class Usage(msgspec.Struct, frozen=True):
    """What a response says it cost, in tokens. `cached_tokens` None: it does not say.

    A field is 0 while the response has not told it.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None


class ResponseHead(msgspec.Struct, frozen=True):
    """The beginning of an endpoint's response; header names lower case, pseudo-headers included.

    `served_by` is the `ip:port` that the proxy says has served; `has_destination_metadata` whether
    the proxy sent metadata of the destination namespace at all. With `reached_no_endpoint` the
    proxy says that no endpoint has seen the request, and the response is its own. `came_at_seconds`
    is on the clock of the hooks, which are told it. With `shows_body` a body is shown as it passes.
    """

    status: int | None
    headers: Mapping[str, str] = _EMPTY
    served_by: str | None = None
    has_destination_metadata: bool = False
    reached_no_endpoint: bool = False
    came_at_seconds: float | None = None
    shows_body: bool = True


class ResponseProgress(msgspec.Struct, frozen=True):
    """How far a response has come with a piece of its body.

    `num_bytes` and `usage` (None: nothing was said) count from the beginning; `is_first` is true of
    the first piece with content, `is_last` of the end of the response.
    """

    now_seconds: float
    num_bytes: int
    usage: Usage | None = None
    is_first: bool = False
    is_last: bool = False


# Dynamic metadata for the proxy: namespace → key → value (text, number, or a map of numbers).
Metadata: TypeAlias = Mapping[str, Mapping[str, "str | float | Mapping[str, float]"]]


class ResponseTap(Protocol):
    """Watches and changes the response of one request. Called in the order of the protocol.

    One that raises is asked for `end()` and for nothing else after that, and the response goes on
    unchanged; so whatever raises must not have taken the piece in before.
    """

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        """The response begins; the headers to set on it."""
        ...

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        """A piece of the body has come; what goes on to the client instead, and metadata with it.

        What is held back comes with a later piece, at the latest with the last one.
        """
        ...

    def end(self) -> bytes:
        """The response ended without a last piece (trailers); what was still held back."""
        ...


class RouteDecision(msgspec.Struct, frozen=True):
    """What the director tells the stream: where to go and what to change on the way.

    `destination` is the `ip:port[,ip:port…]` list; `body` replaces the client's body when not None;
    `metadata` goes to the proxy beside the destination. `response` watches the response (None:
    nobody does); with `skip_response` the picker does not look at it, whatever `response` says.
    With `needs_response_body` a proxy that would not show the body of the response is asked to.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    metadata: Metadata = _EMPTY
    response: ResponseTap | None = None
    skip_response: bool = False
    needs_response_body: bool = False


class FinishCause(Enum):
    """Why a stream ended; each stream reports exactly one.

    SKIPPED: the request went to its endpoint and nobody looked at the response, as was asked for;
    or the proxy asked for no decision, since it answered the client itself or only observes.
    EVICTED: the request was under way and was stopped in favour of others.
    """

    COMPLETED = "completed"
    REFUSED = "refused"
    SKIPPED = "skipped"
    EVICTED = "evicted"
    CLIENT_GONE = "client-gone"
    RESET = "reset"
    SHUTDOWN = "shutdown"
