"""slo-deadline-ordering-policy: the request whose first token is due soonest goes first.

    rank = (arrival at the picker + x-llm-d-slo-ttft-ms, arrival at the picker)

A request whose header is missing or no positive number comes after all others: were zero or less
taken at its word, it would be the way to the front. `x-slo-ttft-ms` is the header's former name.
"""

from __future__ import annotations

import math

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.registry import Parameters, PluginType, plain
from picker.scheduling.latency_objectives import latency_objectives


class SloDeadlineOrderingPolicy:
    """Ranks by what the client asked for. Stateless."""

    def rank(self, item: QueuedRequest) -> Rank:
        received = item.request.received_at_seconds
        asked_ms = latency_objectives(item.request.headers).ttft_ms
        return (math.inf if asked_ms is None else received + asked_ms / 1000, received)


PLUGIN = PluginType("slo-deadline-ordering-policy", Parameters, plain(SloDeadlineOrderingPolicy))
