"""Topology: locations from labels, and nearness to the endpoint of the previous stage."""

from itertools import pairwise

import pytest

from picker.framework.attributes import PEER_ENDPOINT_KEY, Attributes, Topology
from picker.plugins.topology import Tier, shared_tier
from picker.scrape.sources import EndpointExtractor
from picker.types import Candidate, Endpoint
from tests.support.picker.plugin_scenes import configured, passed, placed

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
    assert shared_tier(other, PEER) is tier
    assert shared_tier(PEER, other) is tier


def test_missing_values_equal_nothing() -> None:
    assert shared_tier(Topology(zone="z1"), Topology(zone="z2")) is None
    assert shared_tier(Topology(), Topology()) is None


def test_tiers_are_ordered_by_nearness() -> None:
    tiers = [Tier.HOST, Tier.RACK, Tier.ZONE, Tier.REGION]
    assert all(near > far for near, far in pairwise(tiers))


@pytest.fixture
def candidates() -> list[Candidate]:
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
def test_the_filter_passes_the_tier_and_nearer_ones(
    candidates: list[Candidate], floor: str | None, expected: list[str]
) -> None:
    plugin = configured("topology-affinity-filter", {"minAffinity": floor} if floor else {})
    attributes = beside(Topology("h1", "r1", "z1", "g1"))
    assert passed(plugin, candidates, attributes) == expected


def test_all_pass_where_nearness_is_unknown(candidates: list[Candidate]) -> None:
    plugin = configured("topology-affinity-filter")
    all_endpoints = [candidate.endpoint.name for candidate in candidates]
    assert passed(plugin, candidates) == all_endpoints
    assert passed(plugin, candidates, beside(None)) == all_endpoints
    assert passed(plugin, candidates, beside(Topology())) == all_endpoints
    assert passed(plugin, candidates, beside(Topology("h9", "r1"))) == all_endpoints
    near = beside(Topology("h1"))
    assert passed(plugin, [placed("a"), placed("b")], near) == ["a", "b"]
    assert passed(plugin, [], near) == []


def test_the_extractor_is_configurable() -> None:
    plugin = configured("topology-affinity-filter", {"topologyProducerName": "mine"})
    mine = {"Topology/mine": Topology("h1"), "Topology/topology-extractor": Topology("h2")}
    theirs = {"Topology/mine": Topology("h2"), "Topology/topology-extractor": Topology("h1")}
    attributes = Attributes()
    attributes[PEER_ENDPOINT_KEY] = placed("peer", attributes={"Topology/mine": Topology("h1")})
    candidates = [placed("theirs", attributes=theirs), placed("mine", attributes=mine)]
    assert passed(plugin, candidates, attributes) == ["mine"]


def topology(endpoint: Endpoint, **parameters: str) -> object:
    extractor = configured("topology-extractor", parameters, "where")
    assert isinstance(extractor, EndpointExtractor)
    return extractor.describe(endpoint)["Topology/where"]


def test_a_location_is_read_from_labels() -> None:
    labels = {
        "kubernetes.io/hostname": "h",
        "topology.kubernetes.io/rack": "r",
        "topology.kubernetes.io/zone": "z",
        "nvl": "domain",
    }
    endpoint = Endpoint("a", "10.0.0.1", 1, labels=labels)
    assert topology(endpoint) == Topology("h", "r", "z", "")
    assert topology(endpoint, rack="nvl", hostname="none") == Topology("", "domain", "z", "")


def test_the_node_address_replaces_a_missing_hostname() -> None:
    endpoint = Endpoint("a", "10.0.0.1", 1, node_address="10.9.0.1")
    assert topology(endpoint) == Topology("10.9.0.1")
