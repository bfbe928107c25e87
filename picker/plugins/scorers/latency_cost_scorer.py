"""latency-cost-scorer: prefer endpoints where a request costs all requests the least time.

    score = least cost / cost

over the candidates, where the cost is the predicted time of the request itself and what it adds to
the others there (`scheduling.latency_model` has the formula). So a prefix is left when the prompt
costs less elsewhere than the load here, in one unit. A candidate without a prediction scores 0, and
all of them do while too little was learned: give it a weight far above those of scorers that are to
decide until then, and among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes, latency_predictions_key
from picker.framework.registry import Parameters, PluginType, configured
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
        return [least / cost if cost else 0.0 for cost in costs]


PLUGIN = PluginType(
    "latency-cost-scorer", LatencyCostScorerParameters, configured(LatencyCostScorer)
)
