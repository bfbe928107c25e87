"""kv-cache-utilization-scorer: prefer endpoints with free KV cache.

    score = 1 − kv_cache_usage

An endpoint whose load is unknown (never scraped, or scrapes went stale) scores 0.0, like a full
cache: unknown is not idle. It stays usable, as other scorers may still favour it. One whose page
lacks this series alone has the mean usage of the others, and so neither gains nor loses; where no
page has it, all score 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, plain
from picker.plugins._shared.load_signals import kv_usages
from picker.types import Candidates, InferenceRequest


class KvCacheUtilizationScorer:
    """Scores by free KV cache. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return [0.0 if usage is None else 1.0 - usage for usage in kv_usages(candidates)]


PLUGIN = PluginType("kv-cache-utilization-scorer", Parameters, plain(KvCacheUtilizationScorer))
