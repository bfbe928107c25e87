"""fcfs-ordering-policy: first come, first served.

rank = time of arrival in the queue
"""

from __future__ import annotations

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import Parameters, PluginType, plain


class FcfsOrderingPolicy:
    """Ranks by arrival. Stateless."""

    def rank(self, item: QueuedRequest) -> Rank:
        return (item.enqueued_at_seconds,)


PLUGIN = PluginType("fcfs-ordering-policy", Parameters, plain(FcfsOrderingPolicy))
