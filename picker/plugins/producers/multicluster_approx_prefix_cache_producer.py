"""multicluster-approx-prefix-cache-producer: guess which cluster's pool has seen the prompt before.

Formula and parameters are those of approx-prefix-cache-producer; an endpoint stands for a whole
pool here, so `lruCapacityPerServer` is worth setting to what a pool holds.
"""

from __future__ import annotations

from picker.framework.registry import PluginType, Stability
from picker.plugins.producers.approx_prefix_cache_producer import (
    ApproxPrefixCacheParameters,
    create,
)
from picker.prefix.match import MATCH_INFO

PLUGIN = PluginType(
    "multicluster-approx-prefix-cache-producer",
    ApproxPrefixCacheParameters,
    create,
    default_for=(MATCH_INFO,),
    stability=Stability.ALPHA,
)
