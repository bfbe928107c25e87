"""What data producers find out for one decision: typed attributes, and the shapes that plugins of
several kinds share.

What a prefix cache holds is in `prefix.match`; the tokens of a prompt travel in the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from picker.types import Candidate

INFLIGHT_LOAD = "InFlightLoadDataKey"
LATENCY_PREDICTIONS = "LatencyPredictionInfoDataKey"
ENCODER_MATCHES = "EncoderCacheMatchInfoDataKey"
SESSION_ID = "SessionID"
AGENT_IDENTITY = "agent-identity"
PEER_ENDPOINT = "PeerEndpoint"
TOPOLOGY = "Topology"
_NO_MODALITIES: Mapping[str, Mapping[str, int]] = MappingProxyType({})
# Under this name candidates carry a tuple of `ServedModel`.
MODELS_ATTRIBUTE = "/v1/models/models-data-extractor"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataKey(Generic[T]):
    """Names a finding: what it is and which producer instance made it. Printed `Type/producer`."""

    data_type: str
    producer: str

    def __str__(self) -> str:
        return f"{self.data_type}/{self.producer}"


class Attributes(dict[DataKey[Any], Any]):
    """The findings of one decision by their keys, in the order in which producers made them.

    Owned by the director for the length of that decision. A dict, so that plugins read and write
    without a Python call; they use `get`, `[key] = value`, `items` and `of_type` alone.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # those of a dict, but a key knows the type of its value

        def __setitem__(self, key: DataKey[T], value: T, /) -> None: ...

        def get(self, key: DataKey[T], /) -> T | None:  # type: ignore[override]
            """The finding, or None when no producer made it."""

    def of_type(self, data_type: str) -> tuple[Any, ...]:
        """The findings of one type, of all producers, in the order they were made."""
        return tuple([one for key, one in self.items() if key.data_type == data_type])


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """What this picker itself has under way at one endpoint."""

    requests: int = 0
    tokens: int = 0


@runtime_checkable
class LiveLoad(Protocol):
    """A plugin that knows at any moment what is under way, also outside of decisions."""

    @property
    def loads(self) -> Mapping[str, EndpointLoad]:
        """A live view of the load by endpoint key; an endpoint that is absent has none."""


@dataclass(frozen=True, slots=True)
class EndpointFlow:
    """Whose requests they are that are under way at an endpoint, and of what priority."""

    endpoint_key: str
    fairness_id: str
    priority: int


@runtime_checkable
class FlowLoads(Protocol):
    """A plugin that knows the load of each flow; asking adds it up."""

    def flow_loads(self) -> Mapping[EndpointFlow, EndpointLoad]:
        """The load of each flow that has anything under way."""


@dataclass(frozen=True, slots=True)
class InFlightLoad:
    """Load by endpoint key; an endpoint that is absent has none.

    `uncached_tokens` is what this request would add to each candidate: its prompt tokens less those
    that are cached there; `default_uncached_tokens` to candidates that are absent.
    """

    by_endpoint: Mapping[str, EndpointLoad]
    uncached_tokens: Mapping[str, int]
    default_uncached_tokens: int = 0

    def requests(self, key: str) -> int:
        """Requests under way at endpoint `key`."""
        load = self.by_endpoint.get(key)
        return 0 if load is None else load.requests

    def tokens(self, key: str) -> int:
        """Tokens under way at endpoint `key`."""
        load = self.by_endpoint.get(key)
        return 0 if load is None else load.tokens

    def uncached(self, key: str) -> int:
        """Tokens that this request would add to endpoint `key`."""
        return self.uncached_tokens.get(key, self.default_uncached_tokens)


class LatencyPrediction(msgspec.Struct, frozen=True, gc=False):
    """What this request is predicted to see at one endpoint, in milliseconds.

    `tpot_ms` is None where the time per token is not known. A headroom is the objective less the
    prediction (its p90, where the predictor knows it); negative misses the objective. `is_valid`
    says that the objectives are met; `dispatched` counts what this picker has under way there.
    `cost_ms` is the time that all requests there lose by it, where that is known.
    """

    ttft_ms: float
    tpot_ms: float | None
    ttft_headroom_ms: float
    tpot_headroom_ms: float
    is_valid: bool
    dispatched: int = 0
    cost_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EncoderMatch:
    """Sizes of the request's multi-modal items, and of those that an endpoint has encoded.

    `modalities` counts the latter by endpoint key and modality.
    """

    requested: float
    matched: Mapping[str, float]  # by endpoint key
    modalities: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: _NO_MODALITIES)


@dataclass(frozen=True, slots=True)
class Topology:
    """Where an endpoint stands; "" where that is not known."""

    hostname: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""


def inflight_load_key(producer: str = "inflight-load-producer") -> DataKey[InFlightLoad]:
    """The key under which the producer instance called `producer` stores the load."""
    return DataKey(INFLIGHT_LOAD, producer)


def latency_predictions_key(
    producer: str = "predicted-latency-producer",
) -> DataKey[Mapping[str, LatencyPrediction]]:
    """The key of the predictions, by endpoint key."""
    return DataKey(LATENCY_PREDICTIONS, producer)


def encoder_matches_key(producer: str = "mm-embeddings-cache-producer") -> DataKey[EncoderMatch]:
    """The key of the multi-modal matches."""
    return DataKey(ENCODER_MATCHES, producer)


def session_id_key(producer: str = "session-id-producer") -> DataKey[str]:
    """The key of the session that a request belongs to."""
    return DataKey(SESSION_ID, producer)


def agent_identity_key(producer: str = "agent-identity") -> DataKey[str]:
    """The key of the agent session that a request says it is a turn of."""
    return DataKey(AGENT_IDENTITY, producer)


# What an earlier stage of a disaggregated request was given; itself, and not its key alone, because
# it need not be among the candidates of the later stage.
PEER_ENDPOINT_KEY: DataKey[Candidate] = DataKey(PEER_ENDPOINT, "disagg-profile-handler")

# What flow control has let in that has not left yet, by endpoint key, spread as it expects it. For
# detectors: candidates' own counts include these requests already, but nothing counts their tokens.
LET_IN_LOAD_KEY: DataKey[Mapping[str, EndpointLoad]] = DataKey("LetInLoad", "flow-control")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of an endpoint's `/v1/models`; 0 and "" for what it does not say.

    `parent` is the model that a LoRA adapter belongs to.
    """

    id: str
    object: str = ""
    created: int = 0
    owned_by: str = ""
    parent: str = ""
