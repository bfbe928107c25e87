"""active-request-scorer: prefer endpoints where this picker has few requests in flight.

    score = 1.0                                   when count ≤ idleThreshold (0)
            (max − count) / max · maxBusyScore    else, with max over the candidates (1.0)

The count is the greater of what an inflight-load-producer says and the candidate's own. An endpoint
whose load is unknown (never scraped, or scrapes went stale) scores 0.0 beside others whose load is
known: one that fails every request has nothing under way either. When no candidate's load is known,
the counts decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from picker.framework.attributes import Attributes, inflight_load_key
from picker.framework.registry import NonNegativeInt, Parameters, PluginType, Share, configured
from picker.plugins._shared.load_signals import all_own_requests, unknown_among_known
from picker.types import Candidates, InferenceRequest


class ActiveRequestParameters(Parameters, frozen=True):
    idle_threshold: NonNegativeInt = 0
    max_busy_score: Share = 1.0
    request_timeout: str = ""
    in_flight_load_producer_name: str = "inflight-load-producer"

    @property
    def without_effect(self) -> Mapping[str, str]:
        """As in the reference."""
        return {"requestTimeout": "a request counts until its stream ends"}


class ActiveRequestScorer:
    """Scores by own requests under way. Stateless."""

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
        most, idle, busy = max(counts, default=0), self._idle, self._busy
        return [
            0.0 if unknown else 1.0 if count <= idle else (most - count) / most * busy
            for count, unknown in zip(counts, unknown_among_known(candidates), strict=True)
        ]


PLUGIN = PluginType(
    "active-request-scorer", ActiveRequestParameters, configured(ActiveRequestScorer)
)
