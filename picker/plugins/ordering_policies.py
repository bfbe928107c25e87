"""Orders of the requests of one flow (`framework.flow.OrderingPolicy`).

fcfs-ordering-policy: first come, first served.

    rank = time of arrival in the queue

edf-ordering-policy: earliest end of the time to live first.

    rank = (arrival in the queue + time to live, arrival in the queue)

A request without a time to live comes after all others.
"""

import math

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import PluginType


class FcfsOrderingPolicy:
    def rank(self, item: QueuedRequest) -> Rank:
        return (item.enqueued_at_seconds,)


class EdfOrderingPolicy:
    def rank(self, item: QueuedRequest) -> Rank:
        ttl_seconds = math.inf if item.ttl_seconds is None else item.ttl_seconds
        return (item.enqueued_at_seconds + ttl_seconds, item.enqueued_at_seconds)


PLUGINS = (
    PluginType("fcfs-ordering-policy", FcfsOrderingPolicy),
    PluginType("edf-ordering-policy", EdfOrderingPolicy),
)
