"""latency-slo-admitter: reject sheddable requests whose latency objectives no endpoint can meet.

Asked only about requests of a priority below 0 that name an objective for their latency. Such a
request is refused (429) when there are predictions, and no endpoint

- is predicted to meet the objectives, or
- is idle: nothing runs there, nor has this picker anything under way there, or
- is cold: less than 2 % of its KV cache is in use.

An endpoint whose load is unknown is neither idle nor cold, and one whose page lacks a signal is not
judged by that. (The reference answers 500.)
"""

from __future__ import annotations

from random import Random

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes, latency_predictions_key
from picker.framework.registry import Parameters, PluginType, configured
from picker.scheduling.latency_objectives import latency_objectives
from picker.types import Candidate, Candidates, InferenceRequest

COLD = 0.02


class LatencySloAdmitterParameters(Parameters, frozen=True):
    latency_prediction_info_producer_name: str = "predicted-latency-producer"


class LatencySloAdmitter:
    """Admits what can be served in time. Stateless."""

    def __init__(self, parameters: LatencySloAdmitterParameters) -> None:
        self._key = latency_predictions_key(parameters.latency_prediction_info_producer_name)
        self.consumes = (self._key,)

    def admit(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> None:
        """Raises `RefusedError` (429) as the module says."""
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
    return idle or (metrics.kv_cache_usage is not None and metrics.kv_cache_usage < COLD)


PLUGIN = PluginType(
    "latency-slo-admitter", LatencySloAdmitterParameters, configured(LatencySloAdmitter)
)
