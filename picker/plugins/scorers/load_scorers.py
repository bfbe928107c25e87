"""Scorers of the load of endpoints, each by one signal.

An endpoint whose load is unknown scores 0.0, like the worst of the candidates, and is left out of
min and max: unknown is not idle. While no candidate's load is known, this picker's own requests in
flight stand for the load of each. Where a page lacks only the signal of a scorer, its endpoint gets
the mean of the others. `_shared.load_signals` defines the signals.

queue-scorer: prefer short queues.

    score = (max − q) / (max − min)        over the candidates; 1.0 when all queues are equal

`q` is the number of requests waiting at the endpoint, `max(waiting, inflight − running)`: a burst
between two scrapes spreads although no scrape has seen it yet.

running-requests-size-scorer: prefer endpoints that run few requests.

    score = (max − r) / (max − min)        over the candidates; 1.0 when all are equal

`r` is, likewise, `max(running, inflight − waiting)`.

kv-cache-utilization-scorer: prefer endpoints with free KV cache.

    score = 1 − kv_cache_usage

Where no page has the series, and while no load is known, all score 0.0.

load-aware-scorer: prefer endpoints without a queue, up to a threshold.

    score = 0.5                              when nothing waits
            0.5 · (1 − min(q, T) / T)        else, with T = `threshold` (≤ 0 means the default)

active-request-scorer: prefer endpoints with few requests of this picker in flight.

    score = 1.0                                   when count ≤ idleThreshold
            (max − count) / max · maxBusyScore    else, with max over the candidates

The count is the greater of the counts of an inflight-load-producer and of the candidate. An
endpoint whose load is unknown scores 0.0 beside others whose load is known: an endpoint that fails
every request has nothing in flight either.

token-load-scorer: prefer endpoints where this picker has few tokens in flight.

    t     = tokens in flight there + tokens of this request that are not cached there
    score = 1 − min(t, T) / T        with T = `queueThresholdTokens`

Tokens are those of an inflight-load-producer; without its finding all score 0.0. Unknown load
counts as with active-request-scorer.
"""

from collections.abc import Mapping, Sequence

import msgspec

from picker.framework.attributes import Attributes, InFlightLoad, inflight_load_key
from picker.framework.registry import NonNegativeInt, Parameters, PluginType, PositiveInt, Share
from picker.plugins._shared.load_signals import (
    all_own_requests,
    kv_usages,
    least_first,
    running_loads,
    unknown_among_known,
    waiting_loads,
)
from picker.types import Candidates, InferenceRequest


class QueueScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return least_first(waiting_loads(candidates))


class RunningRequestsSizeScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return least_first(running_loads(candidates))


class KvCacheUtilizationScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return [0.0 if usage is None else 1.0 - usage for usage in kv_usages(candidates)]


DEFAULT_THRESHOLD = 128
BEST = 0.5


class LoadAwareScorer(Parameters, frozen=True):
    threshold: int = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold <= 0:
            msgspec.structs.force_setattr(self, "threshold", DEFAULT_THRESHOLD)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        limit = self.threshold
        return [
            0.0 if queue is None else BEST * (1.0 - min(queue, limit) / limit)
            for queue in waiting_loads(candidates)
        ]


class ActiveRequestParameters(Parameters, frozen=True):
    idle_threshold: NonNegativeInt = 0
    max_busy_score: Share = 1.0
    request_timeout: str = ""
    in_flight_load_producer_name: str = "inflight-load-producer"

    @property
    def without_effect(self) -> Mapping[str, str]:
        return {"requestTimeout": "a request counts until its stream ends"}


class ActiveRequestScorer:
    def __init__(self, parameters: ActiveRequestParameters) -> None:
        self._idle = parameters.idle_threshold
        self._busy = parameters.max_busy_score
        self._key = inflight_load_key(parameters.in_flight_load_producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        load = attributes.get(self._key)
        counts = all_own_requests(candidates, None if load is None else load.by_endpoint)
        # `most` is 0 only if all counts are idle, so that it never divides.
        most, idle, busy = max(counts, default=0), self._idle, self._busy
        return [
            0.0 if unknown else 1.0 if count <= idle else (most - count) / most * busy
            for count, unknown in zip(counts, unknown_among_known(candidates), strict=True)
        ]


class TokenLoadParameters(Parameters, frozen=True):
    queue_threshold_tokens: PositiveInt = 4_194_304
    in_flight_load_producer_name: str = "inflight-load-producer"


class TokenLoadScorer:
    def __init__(self, parameters: TokenLoadParameters) -> None:
        self._threshold = parameters.queue_threshold_tokens
        self._key = inflight_load_key(parameters.in_flight_load_producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        load = attributes.get(self._key)
        if load is None:
            return [0.0] * len(candidates)
        return [
            0.0 if unknown else self._rate(candidate.key, load)
            for candidate, unknown in zip(candidates, unknown_among_known(candidates), strict=True)
        ]

    def _rate(self, key: str, load: InFlightLoad) -> float:
        tokens = load.tokens(key) + load.uncached(key)
        return 1.0 - min(max(tokens, 0), self._threshold) / self._threshold


PLUGINS = (
    PluginType("queue-scorer", QueueScorer),
    PluginType("running-requests-size-scorer", RunningRequestsSizeScorer),
    PluginType("kv-cache-utilization-scorer", KvCacheUtilizationScorer),
    PluginType("load-aware-scorer", LoadAwareScorer),
    PluginType("active-request-scorer", ActiveRequestScorer),
    PluginType("token-load-scorer", TokenLoadScorer),
)
