"""Topology: the location of endpoints, and nearness to the endpoint of the previous stage.

topology-extractor: the location of an endpoint, from its labels. Attribute `Topology/<name of the
plugin>`; a tier without its label is "", but the hostname is then the node's address, if known.

topology-affinity-filter: keep endpoints near the previous stage's.

    keep ⇔ nearest tier shared with the peer is minAffinity or nearer (host > rack > zone > region)

It is a preference of the second stage of a disaggregated request, whose KV cache travels between
the two: without a peer, without the peer's location, and when no endpoint is near, all pass.

topology-affinity-scorer: prefer endpoints near the previous stage's.

    score = 1.0 same host, 0.2 same rack, 0.05 same zone, 0.02 same region, else 0.0

Two endpoints share a tier when both have the same value there; a missing value equals nothing. The
nearest shared tier counts: an endpoint of the same host is near, whatever its rack label says.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from random import Random
from typing import Any, Literal

from picker.framework.attributes import PEER_ENDPOINT_KEY, TOPOLOGY, Attributes, DataKey, Topology
from picker.framework.registry import Parameters, PluginType, Stability
from picker.types import Candidate, Candidates, Endpoint, InferenceRequest


class TopologyParameters(Parameters, frozen=True):
    hostname: str = "kubernetes.io/hostname"
    rack: str = "topology.kubernetes.io/rack"
    zone: str = "topology.kubernetes.io/zone"
    region: str = "topology.kubernetes.io/region"


class TopologyExtractor:
    def __init__(self, name: str, parameters: TopologyParameters) -> None:
        self._attribute = f"{TOPOLOGY}/{name}"
        self._labels = parameters

    def describe(self, endpoint: Endpoint) -> Mapping[str, Topology]:
        labels, names = endpoint.labels, self._labels
        place = Topology(
            hostname=labels.get(names.hostname) or endpoint.node_address or "",
            rack=labels.get(names.rack, ""),
            zone=labels.get(names.zone, ""),
            region=labels.get(names.region, ""),
        )
        return {self._attribute: place}


DEFAULT_TOPOLOGY_PRODUCER = "topology-extractor"


class Tier(IntEnum):
    """A level of nearness; a greater one is nearer."""

    REGION = 1
    ZONE = 2
    RACK = 3
    HOST = 4


def topology_findings(producer: str) -> tuple[DataKey[Any], ...]:
    return (PEER_ENDPOINT_KEY, DataKey(TOPOLOGY, producer))


def topology_of(candidate: Candidate, producer: str) -> Topology | None:
    found = candidate.attributes.get(f"{TOPOLOGY}/{producer}")
    return found if isinstance(found, Topology) else None


def peer_topology(attributes: Attributes, producer: str) -> Topology | None:
    """Return the location of the previous stage's endpoint, if known."""
    peer = attributes.get(PEER_ENDPOINT_KEY)
    return None if peer is None else topology_of(peer, producer)


def shared_tier(one: Topology | None, other: Topology | None) -> Tier | None:
    if one is None or other is None:
        return None
    pairs = (
        (Tier.HOST, one.hostname, other.hostname),
        (Tier.RACK, one.rack, other.rack),
        (Tier.ZONE, one.zone, other.zone),
        (Tier.REGION, one.region, other.region),
    )
    # Unknown values are "", which must not count as a common location.
    return next((tier for tier, here, there in pairs if here and here == there), None)


class TopologyAffinityFilterParameters(Parameters, frozen=True):
    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    topology_producer_name: str = DEFAULT_TOPOLOGY_PRODUCER


class TopologyAffinityFilter:
    def __init__(self, parameters: TopologyAffinityFilterParameters) -> None:
        self._floor = Tier[parameters.min_affinity.upper()]
        self._producer = parameters.topology_producer_name
        self.may_consume = topology_findings(self._producer)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        peer = peer_topology(attributes, self._producer)
        if peer is None:
            return candidates
        near = []
        for candidate in candidates:
            tier = shared_tier(topology_of(candidate, self._producer), peer)
            if tier is not None and tier >= self._floor:
                near.append(candidate)
        return near or candidates


_SCORES = {Tier.HOST: 1.0, Tier.RACK: 0.2, Tier.ZONE: 0.05, Tier.REGION: 0.02, None: 0.0}


class TopologyAffinityScorerParameters(Parameters, frozen=True):
    topology_producer_name: str = DEFAULT_TOPOLOGY_PRODUCER


class TopologyAffinityScorer:
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


PLUGINS = (
    PluginType("topology-extractor", TopologyExtractor, Stability.ALPHA),
    PluginType("topology-affinity-filter", TopologyAffinityFilter, Stability.ALPHA),
    PluginType("topology-affinity-scorer", TopologyAffinityScorer, Stability.ALPHA),
)
