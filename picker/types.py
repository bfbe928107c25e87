"""The values every room of the picker shares. All frozen; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One serving address of the pool: who it is, never how it is doing.

    `key` is "namespace/name" and is the identity used by every map in the picker; it is made once,
    because every decision asks for it many times.
    """

    name: str
    address: str
    port: int
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")

    @property
    def host_port(self) -> str:
        """`ip:port`, IPv6 in brackets; the form Envoy expects in the destination header."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """What one scrape of an endpoint said. `updated_at_seconds` is on the monotonic clock of the
    caller.
    """

    waiting_requests: int = 0
    running_requests: int = 0
    kv_cache_usage: float = 0.0  # 0..1
    block_size_tokens: int | None = None
    num_kv_blocks: int | None = None
    process_start_time_seconds: float | None = None
    updated_at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint as one scheduling decision sees it: identity, last metrics (None: never scraped),
    own load.
    """

    endpoint: Endpoint
    metrics: EndpointMetrics | None = None
    inflight_requests: int = 0

    @property
    def key(self) -> str:
        """Identity within the pool."""
        return self.endpoint.key


class Api(Enum):
    """Which API a request speaks; chosen from its path."""

    CHAT_COMPLETIONS = "chat/completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    CONVERSATIONS = "conversations"
    IMAGES = "images/generations"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A request body after its parser.

    `payload` is the decoded JSON object, or None when the parser keeps the body raw (then no prefix
    is known). `model` is "" when the body names none.
    """

    api: Api
    model: str = ""
    stream: bool = False
    payload: Mapping[str, Any] | None = None
    max_output_tokens: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request on its way through a decision.

    `incoming_model` is what the client asked for, `target_model` what the endpoint will be asked
    for. `prompts` holds, per prompt, its tokens packed as little-endian uint32 (see
    `producers/token_producer`).
    """

    request_id: str
    headers: Mapping[str, str]
    body: ParsedBody
    incoming_model: str
    target_model: str
    size_bytes: int = 0
    prompts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredEndpoint:
    """A candidate with its weighted total score within one profile."""

    candidate: Candidate
    score: float


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Outcome of one scheduling profile: the picked endpoints, best first, and every candidate's
    total.
    """

    picked: tuple[ScoredEndpoint, ...]
    scored: tuple[ScoredEndpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulingResult:
    """Outcome of a decision. `endpoints` is the primary profile's ordered fallback list, never
    empty.
    """

    endpoints: tuple[Endpoint, ...]
    primary_profile: str
    profiles: Mapping[str, ProfileResult] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A complete HTTP request as the proxy handed it over; header names are lower case."""

    headers: Mapping[str, str]
    body: bytes | None  # None: the request has no body
    subset_hint: Sequence[str] | None = None  # None: the whole pool may serve


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """What the director tells the stream: where to go and what to change on the way.

    `destination` is the `ip:port[,ip:port…]` list; `body` replaces the client's body when not None.
    """

    destination: str
    set_headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None


class FinishCause(Enum):
    """Why a stream ended; each stream reports exactly one."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CLIENT_GONE = "client-gone"
    RESET = "reset"
    SHUTDOWN = "shutdown"
