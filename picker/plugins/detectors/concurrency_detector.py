"""concurrency-detector: how full the pool is, by this picker's load in flight.

    requests    Σ requests / Σ maxConcurrency
    tokens      Σ tokens / Σ maxTokenConcurrency
    hybrid      mean over endpoints of max(requests / maxConcurrency, tokens / maxTokenConcurrency)
                1.0 without endpoints

As a filter it passes the endpoints with fewer than int(limit · (1 + headroom)) requests, tokens, or
(hybrid) both in flight; the request is refused when none passes. Counts are the current ones of an
inflight-load-producer, plus requests that flow control has dispatched but that are not routed yet;
they are at least the candidate's own.
"""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Literal

from picker.framework.attributes import (
    LET_IN_LOAD_KEY,
    Attributes,
    EndpointLoad,
    LiveLoad,
    inflight_load_key,
)
from picker.framework.registry import NonNegativeFloat, Parameters, PluginType, PositiveInt
from picker.plugins._shared.load_signals import own_requests, with_headroom
from picker.types import Candidate, Candidates, InferenceRequest

FULL = 1.0
SETTLE_SECONDS = 0.01  # own counts show the end of a request at once
_NOTHING = EndpointLoad()
_NO_LOADS: Mapping[str, EndpointLoad] = MappingProxyType({})


class ConcurrencyDetectorParameters(Parameters, frozen=True):
    max_concurrency: PositiveInt = 100
    headroom: NonNegativeFloat = 0.0
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_token_concurrency: PositiveInt = 1_000_000
    in_flight_load_producer_name: str = "inflight-load-producer"


class ConcurrencyDetector:
    """Compares the picker's own counts with limits. Refers to the counting plugin; has no state."""

    settle_seconds = SETTLE_SECONDS

    may_consume = (LET_IN_LOAD_KEY,)

    def __init__(self, parameters: ConcurrencyDetectorParameters) -> None:
        self._max_requests = parameters.max_concurrency
        self._max_tokens = parameters.max_token_concurrency
        headroom = parameters.headroom
        self._requests_limit = int(with_headroom(self._max_requests, headroom))
        self._tokens_limit = int(with_headroom(self._max_tokens, headroom))
        self._mode = parameters.concurrency_mode
        self._producer = parameters.in_flight_load_producer_name
        self._key = inflight_load_key(self._producer)
        self._live: LiveLoad | None = None
        self.consumes = (self._key,)
        self.references = {"inFlightLoadProducerName": self._producer}

    def connect(self, plugins: Mapping[str, object]) -> None:
        producer = plugins[self._producer]
        if not isinstance(producer, LiveLoad):
            raise ValueError(f"'{self._producer}' does not count the load in flight")
        self._live = producer

    def saturation(
        self, candidates: Candidates, attributes: Attributes, now_seconds: float
    ) -> float:
        if not candidates:
            return FULL
        # Nothing else counts the tokens of dispatched requests until they are routed.
        own, coming = self._own(attributes), attributes.get(LET_IN_LOAD_KEY) or _NO_LOADS
        loads = [_load(candidate, own, coming) for candidate in candidates]
        if self._mode == "requests":
            total = sum(requests for requests, _ in loads) / self._max_requests
        elif self._mode == "tokens":
            total = sum(tokens for _, tokens in loads) / self._max_tokens
        else:
            total = sum(
                max(requests / self._max_requests, tokens / self._max_tokens)
                for requests, tokens in loads
            )
        return total / len(candidates)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        own = self._own(attributes)
        return [one for one in candidates if self._has_room(*_load(one, own))]

    def _has_room(self, requests: int, tokens: int) -> bool:
        if self._mode != "tokens" and requests >= self._requests_limit:
            return False
        return self._mode == "requests" or tokens < self._tokens_limit

    def _own(self, attributes: Attributes) -> Mapping[str, EndpointLoad] | None:
        # Saturation is also computed outside of decisions, where there is no finding.
        if self._live is not None:
            return self._live.loads
        found = attributes.get(self._key)
        return None if found is None else found.by_endpoint


def _load(
    candidate: Candidate,
    own: Mapping[str, EndpointLoad] | None,
    coming: Mapping[str, EndpointLoad] = _NO_LOADS,
) -> tuple[int, int]:
    """Return the requests and tokens in flight; `candidate` already counts those `coming`."""
    load = _NOTHING if own is None else own.get(candidate.key, _NOTHING)
    more = coming.get(candidate.key, _NOTHING)
    requests = max(own_requests(candidate, own), load.requests + more.requests)
    return requests, load.tokens + more.tokens


PLUGIN = PluginType("concurrency-detector", ConcurrencyDetector)
