"""Ordering policies: by arrival, by deadline, by the objective of the first token."""

from math import inf
from typing import Any

import pytest

from picker.framework.flow import OrderingPolicy, Rank
from tests.support.picker.plugin_scenes import configured, queued

FCFS, EDF = "fcfs-ordering-policy", "edf-ordering-policy"
SLO = "slo-deadline-ordering-policy"
TTFT = "x-llm-d-slo-ttft-ms"


@pytest.mark.parametrize(
    ("plugin", "item", "expected"),
    [
        (FCFS, {"at": 3.0, "ttl": 1.0}, (3.0,)),
        (EDF, {"at": 3.0, "ttl": 1.5}, (4.5, 3.0)),
        (EDF, {"at": 3.0, "ttl": None}, (inf, 3.0)),
        (SLO, {"headers": {TTFT: "250"}, "received_at_seconds": 2.0}, (2.25, 2.0)),
        (SLO, {"headers": {"x-slo-ttft-ms": "100"}, "received_at_seconds": 2.0}, (2.1, 2.0)),
        (SLO, {"at": 9.0, "received_at_seconds": 2.0}, (inf, 2.0)),
        (SLO, {"headers": {TTFT: "soon"}}, (inf, 0.0)),
        (SLO, {"headers": {TTFT: ""}}, (inf, 0.0)),
        (SLO, {"headers": {TTFT: "-1"}}, (inf, 0.0)),
        (SLO, {"headers": {TTFT: "0"}}, (inf, 0.0)),
        (SLO, {"headers": {TTFT: "nan"}}, (inf, 0.0)),
    ],
)
def test_a_rank_follows_the_formula(plugin: str, item: dict[str, Any], expected: Rank) -> None:
    assert configured(plugin).rank(queued(**item)) == expected


@pytest.mark.parametrize("plugin", [FCFS, EDF, SLO])
def test_a_policy_fulfils_its_contract(plugin: str) -> None:
    assert isinstance(configured(plugin), OrderingPolicy)
