"""Types that act on the latency objectives of requests: admission, filtering and ordering.

latency-slo-admitter: reject sheddable requests whose objectives no endpoint meets. A request of a
priority below 0 that names an objective is refused (429) when there are predictions and no endpoint

- is predicted to meet the objectives, or
- is idle: it runs nothing, and this picker has nothing in flight there, or
- is cold: less than 2 % of its KV cache is in use.

An endpoint whose load is unknown is neither idle nor cold, and a signal that a page lacks proves
neither. (The reference answers 500.)

slo-headroom-tier-filter: keep endpoints predicted to meet the objectives.

    positive ⇔ TTFT headroom ≥ 0 and TPOT headroom ≥ 0      (headroom = objective − prediction)
    keep = positive; negative with probability epsilonExploreNeg; all when one tier is empty

An endpoint without a prediction is negative. Exploring negative endpoints gives wrong predictions a
chance to be corrected.

slo-deadline-ordering-policy: the soonest due first token goes first.

    rank = (arrival at the picker + x-llm-d-slo-ttft-ms, arrival at the picker)

A request without a positive number comes last; otherwise a 0 would bring a request to the front.
"""

import math
from random import Random

from picker.contrib.latency._objectives import latency_objectives
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import Parameters, PluginType, Share
from picker.types import Candidate, Candidates, InferenceRequest

COLD_KV_USAGE = 0.02


class LatencySloAdmitterParameters(Parameters, frozen=True):
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class LatencySloAdmitter:
    def __init__(self, parameters: LatencySloAdmitterParameters) -> None:
        self._key = latency_predictions_key(parameters.latency_prediction_info_producer_name)
        self.consumes = (self._key,)

    def admit(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> None:
        if request.priority >= 0 or not latency_objectives(request.headers):
            return
        predictions = attributes.get(self._key)
        if not predictions:
            return
        for candidate in candidates:
            prediction = predictions.get(candidate.key)
            if (prediction is not None and prediction.is_valid) or _has_room(candidate):
                return
        raise RefusedError(
            Code.RESOURCE_EXHAUSTED,
            "no endpoint can meet the latency objectives of this request",
            DropReason.SATURATED,
        )


def _has_room(candidate: Candidate) -> bool:
    metrics = candidate.metrics
    if metrics is None:
        return False
    idle = metrics.running_requests == 0 and not candidate.inflight_requests
    return idle or (metrics.kv_cache_usage is not None and metrics.kv_cache_usage < COLD_KV_USAGE)


class SloHeadroomTierParameters(Parameters, frozen=True):
    epsilon_explore_neg: Share = 0.01
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class SloHeadroomTierFilter:
    def __init__(self, parameters: SloHeadroomTierParameters) -> None:
        self._epsilon = parameters.epsilon_explore_neg
        self._key = latency_predictions_key(parameters.latency_prediction_info_producer_name)
        self.consumes = (self._key,)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        predictions = attributes.get(self._key) or {}
        positive: list[Candidate] = []
        negative: list[Candidate] = []
        for candidate in candidates:
            tier = positive if _is_positive(predictions.get(candidate.key)) else negative
            tier.append(candidate)
        if not positive or not negative:
            return candidates
        return negative if rng.random() < self._epsilon else positive


def _is_positive(prediction: LatencyPrediction | None) -> bool:
    return (
        prediction is not None
        and prediction.ttft_headroom_ms >= 0
        and prediction.tpot_headroom_ms >= 0
    )


class SloDeadlineOrderingPolicy:
    def rank(self, item: QueuedRequest) -> Rank:
        received = item.request.received_at_seconds
        objective_ms = latency_objectives(item.request.headers).ttft_ms
        return (math.inf if objective_ms is None else received + objective_ms / 1000, received)


PLUGINS = (
    PluginType("latency-slo-admitter", LatencySloAdmitter),
    PluginType("slo-headroom-tier-filter", SloHeadroomTierFilter),
    PluginType("slo-deadline-ordering-policy", SloDeadlineOrderingPolicy),
)
