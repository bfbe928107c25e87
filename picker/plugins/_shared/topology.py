"""How near two endpoints stand to each other.

The tiers, nearest first: host, rack, zone, region. Two endpoints share a tier when both name the
same value there; a value that is missing equals nothing, another missing one included. The nearest
shared tier counts: an endpoint of the same host is near, whatever the labels say about racks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from picker.framework.attributes import PEER_ENDPOINT_KEY, TOPOLOGY, Attributes, DataKey, Topology
from picker.types import Candidate

DEFAULT_TOPOLOGY_PRODUCER = "topology-extractor"


class Tier(IntEnum):
    """How much two endpoints share; a greater one is nearer."""

    REGION = 1
    ZONE = 2
    RACK = 3
    HOST = 4


def topology_findings(producer: str) -> tuple[DataKey[Any], ...]:
    """What a plugin reads that compares candidates with the endpoint of the stage before."""
    return (PEER_ENDPOINT_KEY, DataKey(TOPOLOGY, producer))


def topology_of(candidate: Candidate, producer: str) -> Topology | None:
    """What the extractor called `producer` found out about where the candidate stands."""
    found = candidate.attributes.get(f"{TOPOLOGY}/{producer}")
    return found if isinstance(found, Topology) else None


def peer_topology(attributes: Attributes, producer: str) -> Topology | None:
    """Where the endpoint of the stage before stands; None without one, or when it is unknown."""
    peer = attributes.get(PEER_ENDPOINT_KEY)
    return None if peer is None else topology_of(peer, producer)


def shared_tier(one: Topology | None, other: Topology | None) -> Tier | None:
    """The nearest tier that both are known to share, if there is one."""
    if one is None or other is None:
        return None
    pairs = (
        (Tier.HOST, one.hostname, other.hostname),
        (Tier.RACK, one.rack, other.rack),
        (Tier.ZONE, one.zone, other.zone),
        (Tier.REGION, one.region, other.region),
    )
    return next((tier for tier, here, there in pairs if here and here == there), None)
