"""edf-ordering-policy: earliest deadline first, by the end of a request's time to live.

    rank = (arrival in the queue + time to live, arrival in the queue)

A request that may wait for ever comes after all others.
"""

from __future__ import annotations

import math

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import Parameters, PluginType, plain


class EdfOrderingPolicy:
    """Ranks by deadline. Stateless."""

    def rank(self, item: QueuedRequest) -> Rank:
        ttl_seconds = math.inf if item.ttl_seconds is None else item.ttl_seconds
        return (item.enqueued_at_seconds + ttl_seconds, item.enqueued_at_seconds)


PLUGIN = PluginType("edf-ordering-policy", Parameters, plain(EdfOrderingPolicy))
