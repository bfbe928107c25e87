"""The findings that plugins of several files share: their shapes and keys.

What a prefix cache holds is in `prefix.match`; the tokens of a prompt travel in the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from picker.framework.attributes import DataKey

INFLIGHT_LOAD = "InFlightLoadDataKey"
LATENCY_PREDICTIONS = "LatencyPredictionInfoDataKey"
ENCODER_MATCHES = "EncoderCacheMatchInfoDataKey"
SESSION_ID = "SessionID"
PEER_ENDPOINT = "PeerEndpoint"
TOPOLOGY = "Topology"


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """What this picker itself has under way at one endpoint."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class InFlightLoad:
    """Load by endpoint key; an endpoint that is absent has none.

    `uncached_tokens` is what this request would add to each candidate: its prompt tokens less those
    that are cached there; `default_uncached_tokens` to candidates that are absent.
    """

    by_endpoint: Mapping[str, EndpointLoad]
    uncached_tokens: Mapping[str, int]
    default_uncached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LatencyPrediction:
    """What this request is predicted to see at one endpoint, in milliseconds.

    A headroom is the objective less the prediction; negative misses the objective. `is_valid` says
    that the objectives are met; `dispatched` counts what this picker has under way there.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_headroom_ms: float
    tpot_headroom_ms: float
    is_valid: bool
    dispatched: int = 0


@dataclass(frozen=True, slots=True)
class EncoderMatch:
    """Sizes of the request's multi-modal items, and of those that an endpoint has encoded."""

    requested: float
    matched: Mapping[str, float]  # by endpoint key


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


# The endpoint (its key) that an earlier stage of a disaggregated request was given.
PEER_ENDPOINT_KEY: DataKey[str] = DataKey(PEER_ENDPOINT, "disagg-profile-handler")
