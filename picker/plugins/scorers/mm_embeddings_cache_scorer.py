"""mm-embeddings-cache-scorer: prefer endpoints that have encoded the request's images and sounds.

    score = Σ sizes of the items encoded there / Σ sizes of all items

An item is counted once however often it occurs. Without items, or without a finding, 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes, encoder_matches_key
from picker.framework.registry import Parameters, PluginType, configured
from picker.types import Candidates, InferenceRequest


class MmEmbeddingsCacheScorerParameters(Parameters, frozen=True):
    producer_name: str = "mm-embeddings-cache-producer"


class MmEmbeddingsCacheScorer:
    """Scores by the share of encoded items. Stateless."""

    def __init__(self, parameters: MmEmbeddingsCacheScorerParameters) -> None:
        self._key = encoder_matches_key(parameters.producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        match = attributes.get(self._key)
        if match is None or match.requested <= 0:
            return [0.0] * len(candidates)
        return [
            min(match.matched.get(candidate.key, 0.0) / match.requested, 1.0)
            for candidate in candidates
        ]


PLUGIN = PluginType(
    "mm-embeddings-cache-scorer",
    MmEmbeddingsCacheScorerParameters,
    configured(MmEmbeddingsCacheScorer),
)
