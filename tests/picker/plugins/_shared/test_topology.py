"""Topology: the nearest tier that two endpoints are known to share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from picker.framework.attributes import Topology
from picker.plugins._shared.topology import Tier, shared_tier

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
