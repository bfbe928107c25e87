"""The comparison of policies repeats itself, and shows what it is there to show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from policies import POLICIES, SAAS, measured

SCENARIO = replace(SAAS, workers=4, groups=12, rate=8.0, seconds=8.0, output=(80, 80))


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Mapping[str, float]]:
    """A few seconds with every policy."""
    return {name: measured(SCENARIO, policy, 1) for name, policy in POLICIES.items()}


def test_every_policy_answers_the_same_requests(rows: Mapping[str, Mapping[str, float]]) -> None:
    """None is refused, all are counted, and a second time everything is as before."""
    assert {row["requests_per_second"] for row in rows.values()} == {
        rows["default"]["requests_per_second"]
    }
    assert {row["refused"] for row in rows.values()} == {0.0}
    assert measured(SCENARIO, POLICIES["random"], 1) == rows["random"]


def test_policies_that_know_prefixes_find_more_cached(
    rows: Mapping[str, Mapping[str, float]],
) -> None:
    """With KV events as well, which come from the workers' own caches."""
    hits = {name: row["hits"] for name, row in rows.items()}
    blind = max(hits[name] for name in ("random", "round robin", "power of two"))
    aware = ("default", "precise", "consistent hashing", "cache_aware", "prefix only")
    assert min(hits[name] for name in aware) > blind + 10


def test_refused_requests_are_counted_and_not_good() -> None:
    """Low priority is shed when the pool is full."""
    crowded = replace(SCENARIO, workers=1, rate=40.0, groups=50, low=0.9, output=(400, 400))
    row = measured(crowded, POLICIES["default"], 1)
    assert 10 < row["refused"] < 95
    assert row["good_per_second"] < row["requests_per_second"] * (1 - row["refused"] / 100) + 1e-9
