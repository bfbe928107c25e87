"""The findings of data producers for one decision: typed attributes, and the structures that
several kinds of plugins share.

The match with a prefix cache is defined in `prefix.match`; the request holds a prompt's tokens.
"""

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
# The attribute of candidates that holds a tuple of `ServedModel`.
MODELS_ATTRIBUTE = "/v1/models/models-data-extractor"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataKey(Generic[T]):
    """The name of a finding: its type and producer instance. It is printed as `Type/producer`."""

    data_type: str
    producer: str

    def __str__(self) -> str:
        return f"{self.data_type}/{self.producer}"


class Attributes(dict[DataKey[Any], Any]):
    """The findings of one decision by their keys, in the order in which producers made them.

    The director owns them during that decision. This is a dict so that plugins read and write
    without a Python call; they use only `get`, `[key] = value`, `items` and `of_type`.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # those of a dict, but a key knows the type of its value

        def __setitem__(self, key: DataKey[T], value: T, /) -> None: ...

        def get(self, key: DataKey[T], /) -> T | None:  # type: ignore[override]
            """Return the finding; None if no producer wrote it."""

    def of_type(self, data_type: str) -> tuple[Any, ...]:
        """Return the findings of one type, of all producers, in the order of their creation."""
        return tuple([one for key, one in self.items() if key.data_type == data_type])


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """This picker's own load in flight at one endpoint."""

    requests: int = 0
    tokens: int = 0


@runtime_checkable
class LiveLoad(Protocol):
    """A plugin that knows the load in flight at any time, also outside of decisions."""

    @property
    def loads(self) -> Mapping[str, EndpointLoad]:
        """A live view of the load by endpoint key, without idle endpoints."""


@dataclass(frozen=True, slots=True)
class EndpointFlow:
    """Identifies the requests in flight at an endpoint with one fairness id and priority."""

    endpoint_key: str
    fairness_id: str
    priority: int


@runtime_checkable
class FlowLoads(Protocol):
    """A plugin that knows the load of each flow."""

    def flow_loads(self) -> Mapping[EndpointFlow, EndpointLoad]:
        """Return the load of each flow that has requests in flight."""


@dataclass(frozen=True, slots=True)
class InFlightLoad:
    """Load by endpoint key, without idle endpoints.

    `uncached_tokens` are the tokens that this request would add to each candidate: its prompt
    tokens less those cached there; `default_uncached_tokens` apply to candidates without an entry.
    """

    by_endpoint: Mapping[str, EndpointLoad]
    uncached_tokens: Mapping[str, int]
    default_uncached_tokens: int = 0

    def requests(self, key: str) -> int:
        load = self.by_endpoint.get(key)
        return 0 if load is None else load.requests

    def tokens(self, key: str) -> int:
        load = self.by_endpoint.get(key)
        return 0 if load is None else load.tokens

    def uncached(self, key: str) -> int:
        return self.uncached_tokens.get(key, self.default_uncached_tokens)


class LatencyPrediction(msgspec.Struct, frozen=True, gc=False):
    """The predicted latencies of this request at one endpoint, in milliseconds.

    `tpot_ms` is None if the time per token is unknown. A headroom is the objective less the
    prediction (its p90, if known); it is negative if the objective is missed. `is_valid`: all
    objectives are met. `dispatched` counts this picker's requests in flight there. `cost_ms` is the
    time that all requests there lose because of this one, if known.
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
    """The sizes of the request's multi-modal items, and of those that an endpoint has encoded.

    `modalities` counts the latter by endpoint key and modality.
    """

    requested: float
    matched: Mapping[str, float]  # by endpoint key
    modalities: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: _NO_MODALITIES)


@dataclass(frozen=True, slots=True)
class Topology:
    """The location of an endpoint; "" for unknown parts."""

    hostname: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""


def inflight_load_key(producer: str = "inflight-load-producer") -> DataKey[InFlightLoad]:
    return DataKey(INFLIGHT_LOAD, producer)


def latency_predictions_key(
    producer: str = "predicted-latency-producer",
) -> DataKey[Mapping[str, LatencyPrediction]]:
    return DataKey(LATENCY_PREDICTIONS, producer)


def encoder_matches_key(producer: str = "mm-embeddings-cache-producer") -> DataKey[EncoderMatch]:
    return DataKey(ENCODER_MATCHES, producer)


# The endpoint of an earlier stage of a disaggregated request: the candidate itself, not its key,
# because it need not be among the candidates of the later stage.
PEER_ENDPOINT_KEY: DataKey[Candidate] = DataKey(PEER_ENDPOINT, "disagg-profile-handler")

# The requests that flow control has admitted and that have not left, by the endpoint expected. For
# detectors: the counts of candidates include these requests, but not their tokens.
LET_IN_LOAD_KEY: DataKey[Mapping[str, EndpointLoad]] = DataKey("LetInLoad", "flow-control")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of an endpoint's `/v1/models`; missing fields are 0 or "".

    `parent` is the model that a LoRA adapter belongs to.
    """

    id: str
    object: str = ""
    created: int = 0
    owned_by: str = ""
    parent: str = ""
