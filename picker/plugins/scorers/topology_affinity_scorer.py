"""topology-affinity-scorer: prefer endpoints near the one that the stage before was given.

    score = 1.0 same host, 0.2 same rack, 0.05 same zone, 0.02 same region, else 0.0

The nearest shared tier counts. Without a peer, or without knowing where it stands, 0.0 for
every endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

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

_SCORES = {Tier.HOST: 1.0, Tier.RACK: 0.2, Tier.ZONE: 0.05, Tier.REGION: 0.02, None: 0.0}


class TopologyAffinityScorerParameters(Parameters, frozen=True):
    topology_producer_name: str = DEFAULT_TOPOLOGY_PRODUCER


class TopologyAffinityScorer:
    """Scores by nearness to the peer. Stateless."""

    def __init__(self, parameters: TopologyAffinityScorerParameters) -> None:
        self._producer = parameters.topology_producer_name
        self.may_consume = topology_findings(self._producer)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        peer = peer_topology(attributes, self._producer)
        return [
            _SCORES[shared_tier(topology_of(candidate, self._producer), peer)]
            for candidate in candidates
        ]


PLUGIN = PluginType(
    "topology-affinity-scorer",
    TopologyAffinityScorerParameters,
    configured(TopologyAffinityScorer),
    stability=Stability.ALPHA,
)
