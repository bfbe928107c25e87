"""Values that all parts of the picker share: frozen, without I/O and without a clock."""

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
    """One serving address of the pool: its identity, never its state.

    `key` is "namespace/name", computed once, because every decision reads it many times.
    `rank_index` distinguishes the ports of a Pod's data-parallel ranks. `metrics_host_port` is the
    address of its metrics page if that differs, `node_address` the machine's, where known.
    `incarnation` names the server at the address, where known: another incarnation is another
    server with an empty cache.
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
    key: str = ""  # overwritten: structs have no field that `__init__` leaves out

    def is_same_server(self, other: Endpoint) -> bool:
        """Return whether the metrics and cache contents of one hold for the other."""
        return self.host_port == other.host_port and self.incarnation == other.incarnation

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "key", f"{self.namespace}/{self.name}")

    @property
    def host_port(self) -> str:
        """Return `ip:port`, IPv6 in brackets; the form Envoy expects in the destination header."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


class ServedTotals(msgspec.Struct, frozen=True, gc=False):
    """The totals that an endpoint has served since its start, as of `read_at_seconds`.
    `ttft_counts` counts requests by the time to the first token: up to each of `ttft_edges` (in
    seconds), and beyond the last. Both are empty where the engine has no such histogram.
    """

    read_at_seconds: float
    generated_tokens: float | None = None
    ttft_edges: tuple[float, ...] = ()
    ttft_counts: tuple[float, ...] = ()


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds, interpolated between edges of a histogram, at most its highest."""

    p50: float
    p95: float
    p99: float


class EndpointMetrics(msgspec.Struct, frozen=True):
    """The result of one scrape. `updated_at_seconds` is on the caller's monotonic clock.

    A load signal is None where the page does not report it; the others then count. LoRA adapters
    are `active_models` and `waiting_models`, at most `max_active_models` at a time (None: unknown).
    The next scrape was due after `interval_seconds`: an idle pool is scraped less often, so a
    scrape is stale when it is older than that and the tolerance. `served` is read once a second at
    most.
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

    It is part of no reference cycle, so the garbage collector does not track it: the records of
    decisions hold hundreds of thousands. `metrics` is None while the load is unknown: never
    scraped, or scrapes went stale; then `last_metrics` are the last known ones. `attributes` are
    findings of data-layer extractors, by "Type/producer".
    """

    endpoint: Endpoint
    metrics: EndpointMetrics | None = None
    inflight_requests: int = 0
    last_metrics: EndpointMetrics | None = None
    attributes: Mapping[str, Any] = _EMPTY

    @property
    def key(self) -> str:
        return self.endpoint.key


# In the order of the pool, unless a filter or a screener says otherwise.
Candidates: TypeAlias = Sequence[Candidate]


class Api(Enum):
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
    """An image, video or audio item in a prompt: `length` tokens from `offset`."""

    modality: str
    content_hash: str
    offset: int
    length: int


class ParsedBody(msgspec.Struct, frozen=True):
    """`payload` is the decoded JSON object, or None when the parser leaves the body raw; of a
    request with text that names no model it is `{"prompt": text}`. `model` is "" when the body
    names none, which leaves the choice to the endpoint. `can_rewrite`: the model is
    `payload["model"]` and may be replaced there. `prompts` holds real token ids, packed as
    little-endian uint32, where the request carries them. With `skip_response` the picker does not
    look at the response.
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
    """`incoming_model` is the model that the client named, `target_model` the one that the endpoint
    will serve. `prompts` holds, per prompt, its tokens packed as little-endian uint32, `features`
    its multi-modal items. `priority` is that of the `objective` (0 if unknown; a request below 0
    may be shed). `received_at_seconds` is on the monotonic clock of all plugins. `size_bytes` is
    the size of the body, `held_bytes` the memory of a waiting request (0: it does not wait).
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
        return sum(map(len, self.prompts)) // BYTES_PER_TOKEN


class ScoredEndpoint(msgspec.Struct, frozen=True):
    """A candidate with its weighted total score within one profile."""

    candidate: Candidate
    score: float


class ScoredCandidates(Sequence[ScoredEndpoint]):
    """Candidates with their totals, in two sequences of equal length that never change. Elements
    are created on access: a decision over a thousand candidates lives as long as its request, and a
    thousand objects for each would be most of the memory.
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
    """The outcome of one scheduling profile: the picked endpoints, best first, and all totals."""

    picked: tuple[ScoredEndpoint, ...]
    scored: Sequence[ScoredEndpoint] = ()


class SchedulingResult(msgspec.Struct, frozen=True):
    """`endpoints` are the primary profile's, at least one; ports may differ from those picked."""

    endpoints: tuple[Endpoint, ...]
    primary_profile: str
    profiles: Mapping[str, ProfileResult] = _EMPTY
    set_headers: Mapping[str, str] = _EMPTY


class RawRequest(msgspec.Struct, frozen=True):
    """A complete HTTP request from the proxy; header names are lower case."""

    headers: Mapping[str, str]
    body: bytes | None  # None: the request has no body
    subset_hint: Sequence[str] | None = None  # None: the whole pool may serve


class Usage(msgspec.Struct, frozen=True):
    """The token counts that a response reports; `cached_tokens` is None if it is not reported."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None


class ResponseHead(msgspec.Struct, frozen=True):
    """The beginning of an endpoint's response; header names are lower case, with pseudo-headers.
    `served_by` is the `ip:port` that served it, as the proxy reports. With `reached_no_endpoint`
    the response is the proxy's own. `came_at_seconds` is on the clock of the hooks, which receive
    it. With `shows_body` the proxy shows the body, or reports on it; with `shows_first_piece` the
    picker sees the first piece when it comes.
    """

    status: int | None
    headers: Mapping[str, str] = _EMPTY
    served_by: str | None = None
    has_destination_metadata: bool = False
    reached_no_endpoint: bool = False
    came_at_seconds: float | None = None
    shows_body: bool = True
    shows_first_piece: bool = True


class ResponseProgress(msgspec.Struct, frozen=True):
    """`num_bytes` and `usage` (None: not reported) count from the beginning; `is_first` is true for
    the first piece with content, `is_last` at the end of the response.
    """

    now_seconds: float
    num_bytes: int
    usage: Usage | None = None
    is_first: bool = False
    is_last: bool = False


class BodyReport(msgspec.Struct, frozen=True):
    """A proxy's report on a body that it does not show: on its first piece, or `is_last`.

    `data` is the part of the body that may have the usage: in full, or its end and perhaps its
    beginning. `num_bytes` and `num_pieces` count from the beginning (None: unknown).
    `first_after_seconds` is the time between the headers and the first piece with content. The
    client left before the end if `is_cut`.
    """

    is_last: bool = False
    data: bytes = b""
    num_bytes: int = 0
    num_pieces: int | None = None
    first_after_seconds: float | None = None
    is_cut: bool = False


# Dynamic metadata for the proxy: namespace → key → value (text, number, or a map of numbers).
Metadata: TypeAlias = Mapping[str, Mapping[str, "str | float | Mapping[str, float]"]]


class ResponseTap(Protocol):
    """Watches and changes the response of one request. Methods are called in the order of the
    protocol. After an exception only `end()` is called, and the rest of the response passes
    unchanged; so a call that raises must not have consumed its piece.
    """

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        """Return the headers to set on the response."""

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        """Return the bytes that the client gets for a piece of the body, and metadata. Bytes that
        are held back follow with a later piece, at the latest with the last one.
        """

    def end(self) -> bytes:
        """Return the bytes held back from a response that ends without a last piece (trailers)."""

    def report(self, report: BodyReport) -> None:
        """Take a report in place of a body that the proxy does not show."""


class RouteDecision(msgspec.Struct, frozen=True):
    """The director's answer to the stream: the destination, and changes to the request.
    `destination` is the `ip:port[,ip:port…]` list, or "", if the proxy's route decides; `body`
    replaces the client's body when not None; `metadata` goes to the proxy beside the destination.
    With `skip_response` the picker does not
    look at the response, whatever `response` is. With `watches_first_piece` a report of the first
    piece of the response has a use when that piece arrives.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    metadata: Metadata = _EMPTY
    response: ResponseTap | None = None
    skip_response: bool = False
    needs_response_body: bool = False
    watches_first_piece: bool = False


class FinishCause(Enum):
    """The reason for a stream's end; each stream reports exactly one. SKIPPED: the response was not
    watched, as requested, or the proxy asked for no decision because it answered the client itself
    or only observes. EVICTED: the request was stopped in favour of others.
    """

    COMPLETED = "completed"
    REFUSED = "refused"
    SKIPPED = "skipped"
    EVICTED = "evicted"
    CLIENT_GONE = "client-gone"
    RESET = "reset"
    SHUTDOWN = "shutdown"
