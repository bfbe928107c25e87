"""Prefer endpoints by predicted latency: by the slack of objectives, or by cost.

latency-scorer: prefer endpoints predicted to meet the latency objectives. A headroom is an
objective less its prediction, for the time to the first token (TTFT) and per token (TPOT). An
endpoint with any negative headroom is negative.

1. Some endpoint is positive: the positive ones are rated by `headroomSelectionStrategy`.
2. All are negative, and some have nothing dispatched: those are rated, by the strategy `least`.
3. All are negative and busy: of those that miss TPOT only, TTFT only, or both, the first nonempty
   group is rated, by the strategy `least`.

Every other endpoint scores 0; an endpoint whose load is known and that has no prediction scores the
mean of those that have one. Rating a group:

    n_d   = (|h_d| − min) / (max − min)     for d = TTFT, TPOT; 0.5 without a range
    c     = w_ttft · n_ttft + w_tpot · n_tpot
    score = (int((1 − c) · 100) + 1) / 100  `least`: the tightest fit first, keep slack for others
            (int(c · 100) + 1) / 100        `most`: the greatest slack first

at most 1, with weights that sum to one; a dimension without a range gets no weight beside one that
has a range.

4. There are no predictions: a composite of known load and cache,

    score = round(100 · (w_kv · (1 − kv) + w_queue · (maxq − q) / maxq + w_prefix · match / total))
            / 100

with weights that sum to one (kv alone when all are 0), (maxq − q) / maxq = 1 for maxq = 0, and q as
in queue-scorer. Unknown load contributes nothing; where a page lacks one signal, kv or q is the
mean of the others.

latency-cost-scorer: prefer endpoints where a request costs all requests the least time.

    score = least cost / cost

over the candidates. The cost is the predicted time of the request itself and the time that it adds
to the other requests there (`_model` has the formula). So a request is sent away from its
cached prefix when computing the prompt elsewhere takes less time than the load costs here. A
candidate whose load is unknown scores 0, one that only lacks a prediction the mean of the others.
All score 0 until enough is learned: give this scorer a weight far above those of the scorers that
decide until then and in ties.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from picker.framework.attributes import Attributes, LatencyPrediction, latency_predictions_key
from picker.framework.registry import NonNegativeFloat, Parameters, PluginType
from picker.plugins._shared.load_signals import (
    kv_usages,
    unknown_among_known,
    waiting_loads,
    with_neutral,
)
from picker.prefix.match import match_info_key
from picker.types import Candidate, Candidates, InferenceRequest

LEAST = "least"
NO_RANGE = 1e-9


class LatencyScorerParameters(Parameters, frozen=True):
    ttft_weight: NonNegativeFloat = 0.8
    tpot_weight: NonNegativeFloat = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"
    composite_kv_weight: NonNegativeFloat = msgspec.field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: NonNegativeFloat = 1.0
    composite_prefix_weight: NonNegativeFloat = 1.0
    latency_prediction_info_producer_name: str = "predicted-latency-producer"
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"


class LatencyScorer:
    def __init__(self, parameters: LatencyScorerParameters) -> None:
        self._ttft, self._tpot = _normalised(
            (parameters.ttft_weight, parameters.tpot_weight), (0.5, 0.5)
        )
        self._kv, self._queue, self._prefix = _normalised(
            (
                parameters.composite_kv_weight,
                parameters.composite_queue_weight,
                parameters.composite_prefix_weight,
            ),
            (1.0, 0.0, 0.0),
        )
        self._strategy = parameters.headroom_selection_strategy
        self._predictions_key = latency_predictions_key(
            parameters.latency_prediction_info_producer_name
        )
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self.consumes = (self._predictions_key,)
        self.may_consume = (self._match_key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        predictions = attributes.get(self._predictions_key) or {}
        predicted = [
            (candidate, prediction)
            for candidate in candidates
            if (prediction := predictions.get(candidate.key)) is not None
            and math.isfinite(prediction.ttft_headroom_ms)
            and math.isfinite(prediction.tpot_headroom_ms)
        ]
        if not predicted:
            return self._composite(candidates, attributes)
        group, strategy = self._group(predicted)
        rated = self._rate(group, strategy)
        scores = {candidate.key: rated.get(candidate.key, 0.0) for candidate, _ in predicted}
        found = [scores.get(candidate.key) for candidate in candidates]
        neutral = with_neutral(found, unknown_among_known(candidates))
        return [0.0 if score is None else score for score in neutral]

    def _group(
        self, predicted: Sequence[tuple[Candidate, LatencyPrediction]]
    ) -> tuple[Mapping[str, LatencyPrediction], str]:
        """Return the group to rate, and the strategy."""
        groups: list[dict[str, LatencyPrediction]] = [{}, {}, {}, {}]
        idle: dict[str, LatencyPrediction] = {}
        for candidate, prediction in predicted:
            late = prediction.ttft_headroom_ms < 0
            slow = prediction.tpot_headroom_ms < 0
            # Groups in the order of preference: positive, TPOT only, TTFT only, both missed.
            groups[2 * late + slow][candidate.key] = prediction
            if not candidate.inflight_requests and not prediction.dispatched:
                idle[candidate.key] = prediction
        if groups[0]:
            return groups[0], self._strategy
        return idle or next(group for group in groups if group), LEAST

    def _rate(self, group: Mapping[str, LatencyPrediction], strategy: str) -> Mapping[str, float]:
        late, late_range = _shares([abs(one.ttft_headroom_ms) for one in group.values()])
        slow, slow_range = _shares([abs(one.tpot_headroom_ms) for one in group.values()])
        ttft, tpot = self._ttft, self._tpot
        if late_range and not slow_range:
            ttft, tpot = 1.0, 0.0
        elif slow_range and not late_range:
            ttft, tpot = 0.0, 1.0
        rated: dict[str, float] = {}
        for key, one, other in zip(group, late, slow, strict=True):
            combined = ttft * one + tpot * other
            share = 1.0 - combined if strategy == LEAST else combined
            rated[key] = min((int(share * 100) + 1) / 100, 1.0)
        return rated

    def _composite(self, candidates: Candidates, attributes: Attributes) -> Sequence[float]:
        match = attributes.get(self._match_key)
        queues, usages = waiting_loads(candidates), kv_usages(candidates)
        longest = max((queue for queue in queues if queue is not None), default=0)
        scores: list[float] = []
        for candidate, queue, usage in zip(candidates, queues, usages, strict=True):
            total = 0.0
            if usage is not None:
                total += self._kv * (1.0 - usage)
            if queue is not None:
                total += self._queue * ((longest - queue) / longest if longest else 1.0)
            if match is not None and match.total_blocks:
                matched = match.match_blocks.get(candidate.key, 0)
                total += self._prefix * matched / match.total_blocks
            scores.append(math.floor(total * 100 + 0.5) / 100)
        return scores


def _normalised(weights: Sequence[float], otherwise: tuple[float, ...]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights) if total > 0 else otherwise


def _shares(values: Sequence[float]) -> tuple[Sequence[float], bool]:
    """Return each value's position between the least and the greatest, and whether these differ."""
    least, greatest = min(values), max(values)
    if greatest - least <= NO_RANGE:
        return [0.5] * len(values), False
    return [(value - least) / (greatest - least) for value in values], True


class LatencyCostScorerParameters(Parameters, frozen=True):
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class LatencyCostScorer:
    def __init__(self, parameters: LatencyCostScorerParameters) -> None:
        self._key = latency_predictions_key(parameters.latency_prediction_info_producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        predictions = attributes.get(self._key) or {}
        found = [predictions.get(candidate.endpoint.key) for candidate in candidates]
        costs = [None if one is None else one.cost_ms for one in found]
        least = min((cost for cost in costs if cost), default=0.0)
        scores = [least / cost if cost else None for cost in costs]
        neutral = with_neutral(scores, unknown_among_known(candidates))
        return [0.0 if score is None else score for score in neutral]


PLUGINS = (
    PluginType("latency-scorer", LatencyScorer),
    PluginType("latency-cost-scorer", LatencyCostScorer),
)
