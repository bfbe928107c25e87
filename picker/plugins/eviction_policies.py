"""Eviction: which running requests flow control may stop, and in which order.

priority-then-time-eviction-order-policy: stop the lowest priority first, then the most recently
dispatched request.

    rank = (priority, −time of dispatch)

sheddable-eviction-filter: only requests of negative priority may be stopped.
"""

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import PluginType, Stability


class PriorityThenTimeEvictionOrderPolicy:
    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        return (item.request.priority, -dispatched_at_seconds)


class SheddableEvictionFilter:
    def is_evictable(self, item: QueuedRequest) -> bool:
        return item.request.priority < 0


PLUGINS = (
    PluginType(
        "priority-then-time-eviction-order-policy",
        PriorityThenTimeEvictionOrderPolicy,
        Stability.ALPHA,
    ),
    PluginType("sheddable-eviction-filter", SheddableEvictionFilter, Stability.ALPHA),
)
