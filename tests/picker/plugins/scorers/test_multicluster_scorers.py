"""The multicluster scorers: pools by what their own pickers report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.interfaces import ConsumesData, Scorer
from picker.framework.registry import Parameters
from picker.plugins.scorers import (
    multicluster_kv_cache_utilization_scorer,
    multicluster_prefix_cache_scorer,
    multicluster_queue_scorer,
)
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, InferenceRequest

QUEUE = "llm-d.ai/multicluster-queue-size/multicluster-metrics-extractor"
KV = "llm-d.ai/multicluster-kv-cache-utilization/multicluster-metrics-extractor"


def _scores(
    plugin: object, request: InferenceRequest, key: str, pools: list[tuple[Candidate, float | None]]
) -> list[float]:
    assert isinstance(plugin, Scorer)
    candidates = [
        replace(candidate, attributes={} if value is None else {key: value})
        for candidate, value in pools
    ]
    return list(plugin.score(request, candidates, Attributes()))


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ([2, 6, 10], [1.0, 0.5, 0.0]),
        ([2, None, 10], [1.0, 0.0, 0.0]),
        ([3, 3], [1.0, 1.0]),
        ([None], [0.0]),
    ],
)
def test_a_pool_without_a_queue_attribute_is_not_compared(
    candidate: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
    queues: list[float | None],
    expected: list[float],
) -> None:
    """The others span the scale; its own queue of a worker is no matter."""
    plugin = multicluster_queue_scorer.PLUGIN.make("q", Parameters())
    pools = [(candidate(waiting_requests=99), queue) for queue in queues]
    assert _scores(plugin, request_for(), QUEUE, pools) == expected


def test_free_cache_of_a_pool_is_its_score(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """Clamped, and 0 while it is unknown."""
    plugin = multicluster_kv_cache_utilization_scorer.PLUGIN.make("kv", Parameters())
    pools = [(candidate(), usage) for usage in (0.0, 0.75, 1.5, -1.0, None)]
    assert _scores(plugin, request_for(), KV, pools) == [1.0, 0.25, 0.0, 1.0, 0.0]


def test_prefixes_of_pools_come_from_a_producer_of_their_own(
    candidate: Callable[..., Candidate], request_for: Callable[..., InferenceRequest]
) -> None:
    """The formula is that of prefix-cache-scorer."""
    module = multicluster_prefix_cache_scorer
    plugin = module.PLUGIN.make("p", module.MulticlusterPrefixCacheParameters())
    key = match_info_key("multicluster-approx-prefix-cache-producer")
    assert isinstance(plugin, ConsumesData)
    assert isinstance(plugin, Scorer)
    assert plugin.consumes == (key,)
    attributes = Attributes()
    attributes.put(key, PrefixCacheMatchInfo(10, 64, {"default/a": 5}))
    candidates = [candidate("a"), candidate("b")]
    assert list(plugin.score(request_for(), candidates, attributes)) == [0.5, 0.0]
