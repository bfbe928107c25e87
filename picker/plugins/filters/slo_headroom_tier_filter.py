"""slo-headroom-tier-filter: keep the endpoints that are predicted to meet the objectives.

    positive ⇔ TTFT headroom ≥ 0 and TPOT headroom ≥ 0      (headroom = objective − prediction)
    keep = positive; negative with probability epsilonExploreNeg; all when only one tier has any

An endpoint without a prediction is negative. Without any prediction there are no tiers, and all are
kept. Negative endpoints are explored so that predictions which are wrong get a chance to be
corrected.
"""

from __future__ import annotations

from random import Random

from picker.framework.attributes import (
    Attributes,
    LatencyPrediction,
    latency_predictions_key,
)
from picker.framework.registry import Parameters, PluginType, Share, configured
from picker.types import Candidate, Candidates, InferenceRequest


class SloHeadroomTierParameters(Parameters, frozen=True):
    epsilon_explore_neg: Share = 0.01
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class SloHeadroomTierFilter:
    """Keeps one tier. Stateless."""

    def __init__(self, parameters: SloHeadroomTierParameters) -> None:
        self._epsilon = parameters.epsilon_explore_neg
        self._key = latency_predictions_key(parameters.latency_prediction_info_producer_name)
        self.consumes = (self._key,)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """One tier of the candidates, or all."""
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


PLUGIN = PluginType(
    "slo-headroom-tier-filter", SloHeadroomTierParameters, configured(SloHeadroomTierFilter)
)
