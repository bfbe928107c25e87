"""kv-cache-utilization-scorer: free cache first, and unknown is full."""

from __future__ import annotations

from collections.abc import Callable

from picker.framework.attributes import Attributes
from picker.plugins.scorers.kv_cache_utilization_scorer import KvCacheUtilizationScorer
from picker.types import Candidate, InferenceRequest


def test_the_score_is_the_free_share(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """1 − usage; 0 for an endpoint whose usage is unknown."""
    candidates = [
        candidate(kv_cache_usage=0.0),
        candidate(kv_cache_usage=0.75),
        candidate(kv_cache_usage=1.0),
        candidate(known=False),
    ]
    scores = KvCacheUtilizationScorer().score(request_for(), candidates, Attributes())
    assert list(scores) == [1.0, 0.25, 0.0, 0.0]
