"""mm-embeddings-cache-scorer: encoded items first."""

from __future__ import annotations

from collections.abc import Callable

from picker.framework.attributes import Attributes
from picker.framework.findings import EncoderMatch, encoder_matches_key
from picker.plugins.scorers.mm_embeddings_cache_scorer import (
    MmEmbeddingsCacheScorer,
    MmEmbeddingsCacheScorerParameters,
)
from picker.types import Candidate, InferenceRequest


def test_the_score_is_the_encoded_share(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """Matched over requested sizes; nothing for a request without items, or no finding."""
    scorer = MmEmbeddingsCacheScorer(MmEmbeddingsCacheScorerParameters(producer_name="mine"))
    key = encoder_matches_key("mine")
    candidates = [candidate(name) for name in "abc"]
    attributes = Attributes()
    assert list(scorer.score(request_for(), candidates, attributes)) == [0.0, 0.0, 0.0]
    attributes.put(key, EncoderMatch(4.0, {"default/a": 1.0, "default/c": 4.0}))
    assert list(scorer.score(request_for(), candidates, attributes)) == [0.25, 0.0, 1.0]
    attributes.put(key, EncoderMatch(0.0, {}))
    assert list(scorer.score(request_for(), candidates, attributes)) == [0.0, 0.0, 0.0]
    assert scorer.consumes == (key,)
