"""latency-cost-scorer: prefer endpoints where a request costs all requests the least time.

    score = least cost / cost

over the candidates, where the cost is the predicted time of the request itself and what it adds to
the others there (`scheduling.latency_model` has the formula). So a prefix is left when the prompt
costs less elsewhere than the load here, in one unit. A candidate whose load is unknown scores 0,
one that lacks a prediction alone the mean of the others. All score 0 while too little was learned:
give it a weight far above those of scorers that are to decide until then, and among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes, latency_predictions_key
from picker.framework.registry import Parameters, PluginType, configured
from picker.plugins._shared.load_signals import unknown_among_known, with_neutral
from picker.types import Candidates, InferenceRequest


class LatencyCostScorerParameters(Parameters, frozen=True):
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class LatencyCostScorer:
    """Scores by predicted cost. Stateless."""

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


PLUGIN = PluginType(
    "latency-cost-scorer", LatencyCostScorerParameters, configured(LatencyCostScorer)
)
