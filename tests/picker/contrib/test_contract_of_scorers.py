"""The contract of the shelf's scorers, as far as it depends on what only they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import Attributes
from picker.types import Candidate, EndpointMetrics
from tests.depth import examples
from tests.support.picker.scorer_contract import (
    check_scores,
    check_unknown_load,
    findings,
    metrics,
    pools,
)

REPORTED = (
    "llm-d.ai/multicluster-queue-size/multicluster-metrics-extractor",
    "llm-d.ai/multicluster-kv-cache-utilization/multicluster-metrics-extractor",
)


@pytest.mark.parametrize(
    "name", ["multicluster-queue-scorer", "multicluster-kv-cache-utilization-scorer"]
)
@examples(60)
@given(pool=pools(REPORTED), found=findings())
def test_pools_that_report_anything_get_scores_within_zero_and_one(
    name: str, pool: list[Candidate], found: Attributes
) -> None:
    check_scores(name, pool, found)


@pytest.mark.parametrize(
    "name",
    ["latency-scorer", "cache-aware-scorer", "consistent-hashing-scorer", "dynamo-cost-scorer"],
)
@examples(60)
@given(known=st.lists(metrics, min_size=1, max_size=4), found=findings())
def test_unknown_load_never_looks_better_than_known_load(
    name: str, known: list[EndpointMetrics], found: Attributes
) -> None:
    check_unknown_load(name, known, found)
