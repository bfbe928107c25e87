"""The contract of every scorer, for any candidates and findings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import Attributes
from picker.framework.interfaces import Scorer
from picker.types import Candidate, EndpointMetrics
from tests.depth import examples
from tests.support.picker.plugin_scenes import types_of
from tests.support.picker.scorer_contract import (
    PARAMETERS,
    check_scores,
    check_unknown_load,
    findings,
    metrics,
    pools,
)


@pytest.mark.parametrize("name", sorted([*types_of(Scorer), *PARAMETERS]))
@examples(30)
@given(pool=pools(), found=findings(), tokens=st.integers(0, 40))
def test_each_candidate_gets_one_score_within_zero_and_one(
    name: str, pool: list[Candidate], found: Attributes, tokens: int
) -> None:
    check_scores(name, pool, found, tokens)


@pytest.mark.parametrize(
    "name",
    [
        "queue-scorer",
        "running-requests-size-scorer",
        "kv-cache-utilization-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
        "active-request-scorer",
        "token-load-scorer",
        "expected-cost-scorer",
    ],
)
@examples(30)
@given(known=st.lists(metrics, min_size=1, max_size=4), found=findings())
def test_unknown_load_never_looks_better_than_known_load(
    name: str, known: list[EndpointMetrics], found: Attributes
) -> None:
    check_unknown_load(name, known, found)
