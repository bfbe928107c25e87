"""multicluster-prefix-cache-scorer: prefer pools of other clusters that saw the prompt before.

The formula and the parameters are those of prefix-cache-scorer. The matches are by default those of
a multicluster-approx-prefix-cache-producer, for which an endpoint is a whole pool.
"""

from __future__ import annotations

from picker.framework.registry import PluginType, Stability, configured
from picker.plugins.scorers.prefix_cache_scorer import PrefixCacheParameters, PrefixCacheScorer


class MulticlusterPrefixCacheParameters(PrefixCacheParameters, frozen=True):
    prefix_match_info_producer_name: str = "multicluster-approx-prefix-cache-producer"


PLUGIN = PluginType(
    "multicluster-prefix-cache-scorer",
    MulticlusterPrefixCacheParameters,
    configured(PrefixCacheScorer),
    stability=Stability.ALPHA,
)
