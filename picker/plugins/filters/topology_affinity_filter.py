"""topology-affinity-filter: keep the endpoints near the one that the stage before was given.

    keep ⇔ nearest tier shared with the peer is minAffinity or nearer (host > rack > zone > region)

Meant for the second stage of a disaggregated request, whose KV cache travels between the two. It is
a preference: without a peer, without knowing where it stands, and when none is near, all are
kept. An endpoint of which nothing is known is near to none.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, Stability, configured
from picker.plugins._shared.topology import (
    DEFAULT_TOPOLOGY_PRODUCER,
    Tier,
    peer_topology,
    shared_tier,
    topology_findings,
    topology_of,
)
from picker.types import Candidates, InferenceRequest


class TopologyAffinityFilterParameters(Parameters, frozen=True):
    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    topology_producer_name: str = DEFAULT_TOPOLOGY_PRODUCER


class TopologyAffinityFilter:
    """Keeps what is near the peer. Stateless."""

    def __init__(self, parameters: TopologyAffinityFilterParameters) -> None:
        self._floor = Tier[parameters.min_affinity.upper()]
        self._producer = parameters.topology_producer_name
        self.may_consume = topology_findings(self._producer)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        """The candidates near the peer, or all."""
        peer = peer_topology(attributes, self._producer)
        if peer is None:
            return candidates
        near = []
        for candidate in candidates:
            tier = shared_tier(topology_of(candidate, self._producer), peer)
            if tier is not None and tier >= self._floor:
                near.append(candidate)
        return near or candidates


PLUGIN = PluginType(
    "topology-affinity-filter",
    TopologyAffinityFilterParameters,
    configured(TopologyAffinityFilter),
    stability=Stability.ALPHA,
)
