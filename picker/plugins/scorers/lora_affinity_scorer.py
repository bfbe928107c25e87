"""lora-affinity-scorer: prefer endpoints that have loaded the request's LoRA adapter.

    score = 1.0    the target model is an active adapter there
            0.8    else, when there is room for one more: active + waiting < max
            0.6    else, when the target model waits there to be loaded
            0.5    else, when the page does not report adapters
            0.0    else, and when the endpoint's load is unknown

The target model counts as an adapter even if it is the base model. A page without the series, such
as vLLM's before its first request, shows neither room nor the lack of it.
"""

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import PluginType
from picker.types import Candidates, EndpointMetrics, InferenceRequest

ACTIVE = 1.0
ROOM = 0.8
WAITING = 0.6
NEUTRAL = 0.5  # below those that have or can load it, above those known to be full


class LoraAffinityScorer:
    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return [_score(request.target_model, candidate.metrics) for candidate in candidates]


def _score(model: str, metrics: EndpointMetrics | None) -> float:
    if metrics is None:
        return 0.0
    if model in metrics.active_models:
        return ACTIVE
    loaded = len(metrics.active_models) + len(metrics.waiting_models)
    if metrics.max_active_models is None and not loaded:
        return NEUTRAL
    if loaded < (metrics.max_active_models or 0):
        return ROOM
    return WAITING if model in metrics.waiting_models else 0.0


PLUGIN = PluginType("lora-affinity-scorer", LoraAffinityScorer)
