"""multicluster-kv-cache-utilization-scorer: prefer pools of other clusters with free KV cache.

    score = 1 − u        clamped to 0..1

An endpoint stands for a whole pool here; `u` is its attribute
`llm-d.ai/multicluster-kv-cache-utilization`, the average that the picker of that pool reports. A
pool that reports its queue, but not its KV cache, has the mean of the others; one that reports
neither scores 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, plain
from picker.plugins._shared.load_signals import with_neutral
from picker.scheduling.endpoint_attributes import (
    MULTICLUSTER_KV_CACHE_UTILIZATION,
    MULTICLUSTER_METRICS,
    attribute_number,
    pools_unknown,
)
from picker.types import Candidates, InferenceRequest


class MulticlusterKvCacheUtilizationScorer:
    """Scores pools by free KV cache. Stateless."""

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        found = [
            attribute_number(one, MULTICLUSTER_KV_CACHE_UTILIZATION, MULTICLUSTER_METRICS)
            for one in candidates
        ]
        usages = with_neutral(found, pools_unknown(candidates))
        return [0.0 if usage is None else 1.0 - min(max(usage, 0.0), 1.0) for usage in usages]


PLUGIN = PluginType(
    "multicluster-kv-cache-utilization-scorer",
    Parameters,
    plain(MulticlusterKvCacheUtilizationScorer),
    stability=Stability.ALPHA,
)
