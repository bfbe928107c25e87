"""Ordering policies: by arrival and by deadline."""

from math import inf
from typing import Any

import pytest

from picker.framework.flow import OrderingPolicy, Rank
from tests.support.picker.plugin_scenes import configured, queued, types_of

FCFS, EDF = "fcfs-ordering-policy", "edf-ordering-policy"


@pytest.mark.parametrize(
    ("plugin", "item", "expected"),
    [
        (FCFS, {"at": 3.0, "ttl": 1.0}, (3.0,)),
        (EDF, {"at": 3.0, "ttl": 1.5}, (4.5, 3.0)),
        (EDF, {"at": 3.0, "ttl": None}, (inf, 3.0)),
    ],
)
def test_a_rank_follows_the_formula(plugin: str, item: dict[str, Any], expected: Rank) -> None:
    assert configured(plugin).rank(queued(**item)) == expected


@pytest.mark.parametrize("plugin", types_of(OrderingPolicy))
def test_a_policy_fulfils_its_contract(plugin: str) -> None:
    assert isinstance(configured(plugin), OrderingPolicy)
