"""Nearness of endpoints to the endpoint of the previous stage."""

from __future__ import annotations

from itertools import pairwise

import pytest

from picker.framework.attributes import PEER_ENDPOINT_KEY, Attributes, Topology
from picker.plugins.topology import Tier, shared_tier
from picker.types import Candidate
from tests.support.picker.plugin_scenes import configured, kept, placed

PEER = Topology("h1", "r1", "z1", "g1")


@pytest.mark.parametrize(
    ("other", "tier"),
    [
        (Topology("h1", "r1", "z1", "g1"), Tier.HOST),
        (Topology("h1", "r2", "z2", "g2"), Tier.HOST),
        (Topology("h1"), Tier.HOST),
        (Topology("h2", "r1", "z1", "g1"), Tier.RACK),
        (Topology("", "r1", "z2", ""), Tier.RACK),
        (Topology("h2", "r2", "z1", "g1"), Tier.ZONE),
        (Topology("h2", "r2", "z2", "g1"), Tier.REGION),
        (Topology("h2", "r2", "z2", "g2"), None),
        (Topology(), None),
        (None, None),
    ],
)
def test_the_nearest_shared_tier_counts(other: Topology | None, tier: Tier | None) -> None:
    """In either direction."""
    assert shared_tier(other, PEER) is tier
    assert shared_tier(PEER, other) is tier


def test_missing_values_equal_nothing() -> None:
    """Not even each other."""
    assert shared_tier(Topology(zone="z1"), Topology(zone="z2")) is None
    assert shared_tier(Topology(), Topology()) is None


def test_tiers_are_ordered_by_nearness() -> None:
    """Host is nearer than rack, than zone, than region."""
    tiers = [Tier.HOST, Tier.RACK, Tier.ZONE, Tier.REGION]
    assert all(near > far for near, far in pairwise(tiers))


@pytest.fixture
def candidates() -> list[Candidate]:
    """One at each distance from `PEER`, and one of which nothing is known."""
    places = {
        "region": Topology("h4", "r3", "z2", "g1"),
        "host": Topology("h1", "r1", "z1", "g1"),
        "zone": Topology("h3", "r2", "z1", "g1"),
        "rack": Topology("h2", "r1", "z1", "g1"),
        "far": Topology("h5", "r4", "z3", "g2"),
    }
    known = [
        placed(name, attributes={"Topology/topology-extractor": place})
        for name, place in places.items()
    ]
    return [*known, placed("unknown")]


def beside(place: Topology | None) -> Attributes:
    """The findings after a stage that was given an endpoint at `place`."""
    attributes = Attributes()
    known = {} if place is None else {"Topology/topology-extractor": place}
    attributes[PEER_ENDPOINT_KEY] = placed("peer", attributes=known)
    return attributes


@pytest.mark.parametrize(
    ("floor", "expected"),
    [
        (None, ["host"]),
        ("host", ["host"]),
        ("rack", ["host", "rack"]),
        ("zone", ["host", "zone", "rack"]),
        ("region", ["region", "host", "zone", "rack"]),
    ],
)
def test_it_keeps_that_tier_and_nearer_ones(
    candidates: list[Candidate], floor: str | None, expected: list[str]
) -> None:
    """Host is the default; the peer itself need not be a candidate."""
    plugin = configured("topology-affinity-filter", {"minAffinity": floor} if floor else {})
    attributes = beside(Topology("h1", "r1", "z1", "g1"))
    assert kept(plugin, candidates, attributes) == expected


def test_nothing_is_dropped_where_nearness_says_nothing(candidates: list[Candidate]) -> None:
    """No peer, a peer nobody knows the place of, nobody near, nobody known."""
    plugin = configured("topology-affinity-filter")
    everybody = [candidate.endpoint.name for candidate in candidates]
    assert kept(plugin, candidates) == everybody
    assert kept(plugin, candidates, beside(None)) == everybody
    assert kept(plugin, candidates, beside(Topology())) == everybody
    assert kept(plugin, candidates, beside(Topology("h9", "r1"))) == everybody
    near = beside(Topology("h1"))
    assert kept(plugin, [placed("a"), placed("b")], near) == ["a", "b"]
    assert kept(plugin, [], near) == []


def test_another_extractor_can_be_named() -> None:
    """Of the peer and of the candidates alike."""
    plugin = configured("topology-affinity-filter", {"topologyProducerName": "mine"})
    mine = {"Topology/mine": Topology("h1"), "Topology/topology-extractor": Topology("h2")}
    theirs = {"Topology/mine": Topology("h2"), "Topology/topology-extractor": Topology("h1")}
    attributes = Attributes()
    attributes[PEER_ENDPOINT_KEY] = placed("peer", attributes={"Topology/mine": Topology("h1")})
    candidates = [placed("theirs", attributes=theirs), placed("mine", attributes=mine)]
    assert kept(plugin, candidates, attributes) == ["mine"]
