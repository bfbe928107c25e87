"""token-load-scorer: prefer endpoints where this picker has few tokens in flight.

    t     = tokens under way there + tokens of this request that are not cached there
    score = 1 − min(t, T) / T        with T = `queueThresholdTokens` (4194304)

Tokens are those of an inflight-load-producer; without its finding all score 0.0. An
endpoint whose load is unknown (never scraped, or scrapes went stale) scores 0.0 beside others whose
load is known: one that fails every request has nothing under way either. When no candidate's load
is known, the tokens decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes, InFlightLoad, inflight_load_key
from picker.framework.registry import Parameters, PluginType, PositiveInt, configured
from picker.plugins._shared.load_signals import unknown_among_known
from picker.types import Candidates, InferenceRequest


class TokenLoadParameters(Parameters, frozen=True):
    queue_threshold_tokens: PositiveInt = 4_194_304
    in_flight_load_producer_name: str = "inflight-load-producer"


class TokenLoadScorer:
    """Scores by own tokens under way against a fixed threshold. Stateless."""

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


PLUGIN = PluginType("token-load-scorer", TokenLoadParameters, configured(TokenLoadScorer))
