"""kv-cache-utilization-scorer: prefer endpoints with free KV cache.

    score = 1 − kv_cache_usage

An endpoint whose usage is unknown (never scraped, or scrapes went stale) scores 0.0, like a full
cache: unknown is not idle. It stays usable, as other scorers may still favour it.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.types import Candidates, InferenceRequest


class KvCacheUtilizationScorer:
    """Scores by free KV cache. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return [
            0.0 if candidate.metrics is None else 1.0 - candidate.metrics.kv_cache_usage
            for candidate in candidates
        ]


PLUGIN = PluginType("kv-cache-utilization-scorer", Parameters, plain(KvCacheUtilizationScorer))
