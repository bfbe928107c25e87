"""prefix-cache-affinity-filter: keep endpoints that hold most of the prompt, if fast enough.

    sticky ⇔ match / total ≥ affinityThreshold
    slower = best TTFT of the sticky ones − best TTFT of the others
    keep = the sticky ones, when there are any and slower ≤ maxTTFTPenaltyMs
           all otherwise, and with probability explorationProbability

TTFT in ms is that of the tokens in flight, tokens / peakPrefillThroughput (tokens/s) × 1000, or the
prediction with `ttftSource: latencyPredictor`; an endpoint without one counts as the slowest. With
maxTTFTPenaltyMs ≤ 0 sticky endpoints always pass; affinityThreshold ≤ 0 turns the filter off.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Annotated, Any, Literal

import msgspec

from picker.framework.attributes import (
    Attributes,
    DataKey,
    inflight_load_key,
    latency_predictions_key,
)
from picker.framework.registry import Parameters, PluginType, Share
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, Candidates, InferenceRequest

_MS = 1000.0


class PrefixCacheAffinityParameters(Parameters, frozen=True):
    affinity_threshold: Annotated[float, msgspec.Meta(le=1)] = 0.80
    exploration_probability: Share = 0.0
    max_ttft_penalty_ms: float = msgspec.field(default=18000.0, name="maxTTFTPenaltyMs")
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    # Measured with Qwen 32B on two H100 (tensor parallel) and vLLM 0.19.
    peak_prefill_throughput: float = 15928.0
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    latency_prediction_info_producer_name: str = "predicted-latency-producer"
    in_flight_load_producer_name: str = "inflight-load-producer"


class PrefixCacheAffinityFilter:
    def __init__(self, parameters: PrefixCacheAffinityParameters) -> None:
        if parameters.ttft_source == "prefillThroughput":
            throughput = parameters.peak_prefill_throughput
            if throughput <= 0:
                raise ValueError(f"peakPrefillThroughput must be positive, got {throughput}")
        self._parameters = parameters
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._load_key = inflight_load_key(parameters.in_flight_load_producer_name)
        self._prediction_key = latency_predictions_key(
            parameters.latency_prediction_info_producer_name
        )
        self._predicts = parameters.ttft_source == "latencyPredictor"

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        if self._parameters.affinity_threshold <= 0:
            return ()
        if self._parameters.max_ttft_penalty_ms <= 0:
            return (self._match_key,)
        return (self._match_key, self._prediction_key if self._predicts else self._load_key)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        parameters = self._parameters
        if len(candidates) <= 1 or parameters.affinity_threshold <= 0:
            return candidates
        explore = parameters.exploration_probability
        if explore > 0 and rng.random() < explore:
            return candidates
        info = attributes.get(self._match_key)
        if info is None or info.total_blocks <= 0:
            return candidates
        sticky = [candidate for candidate in candidates if self._is_sticky(candidate, info)]
        if not sticky or self._is_too_slow(sticky, candidates, attributes):
            return candidates
        return sticky

    def _is_sticky(self, candidate: Candidate, info: PrefixCacheMatchInfo) -> bool:
        share = info.match_blocks.get(candidate.key, 0) / info.total_blocks
        return share >= self._parameters.affinity_threshold

    def _is_too_slow(
        self, sticky: Candidates, candidates: Candidates, attributes: Attributes
    ) -> bool:
        penalty = self._parameters.max_ttft_penalty_ms
        if penalty <= 0 or len(sticky) == len(candidates):
            return False
        ttft_ms = self._ttft_ms(attributes)
        keys = {candidate.key for candidate in sticky}
        others = [candidate for candidate in candidates if candidate.key not in keys]
        best_other = min(map(ttft_ms, others), default=math.inf)
        # Endpoints of unknown TTFT cannot be called faster.
        return best_other < math.inf and min(map(ttft_ms, sticky)) - best_other > penalty

    def _ttft_ms(self, attributes: Attributes) -> Callable[[Candidate], float]:
        if self._predicts:
            predictions = attributes.get(self._prediction_key) or {}

            def predicted(candidate: Candidate) -> float:
                found = predictions.get(candidate.key)
                return math.inf if found is None or math.isnan(found.ttft_ms) else found.ttft_ms

            return predicted
        load = attributes.get(self._load_key)
        per_token_ms = _MS / self._parameters.peak_prefill_throughput

        def estimated(candidate: Candidate) -> float:
            found = None if load is None else load.by_endpoint.get(candidate.key)
            return 0.0 if found is None else found.tokens * per_token_ms

        return estimated


PLUGIN = PluginType("prefix-cache-affinity-filter", PrefixCacheAffinityFilter)
