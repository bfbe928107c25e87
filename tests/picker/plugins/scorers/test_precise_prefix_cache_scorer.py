"""precise-prefix-cache-scorer: it finds and scores by itself."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack

import msgspec
import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import DataProducer, KvEventConsumer, PreRequest, Scorer
from picker.framework.registry import Stability
from picker.plugins.producers.precise_prefix_cache_producer import PrecisePrefixCacheParameters
from picker.plugins.scorers.precise_prefix_cache_scorer import PLUGIN, PrecisePrefixCacheScorer
from picker.types import Candidate, InferenceRequest


def test_the_share_of_the_prompt_that_an_engine_holds_is_the_score(
    request_for: Callable[..., InferenceRequest], candidate: Callable[..., Candidate]
) -> None:
    """One of two blocks at `a`, none at `b`."""
    plugin = PLUGIN.make("precise", PrecisePrefixCacheParameters())
    assert isinstance(plugin, PrecisePrefixCacheScorer)
    event = ["BlockStored", [1], None, list(range(16)), 16]
    plugin.kv_events("default/a", "kv@a@m", msgspec.msgpack.encode([1.0, [event]]))
    attributes = Attributes()
    candidates = [candidate("a"), candidate("b")]
    prompt = pack("<32I", *range(32))
    request = plugin.produce(request_for(prompts=(prompt,)), candidates, attributes)
    assert plugin.score(request, candidates, attributes) == [0.5, 0.0]


def test_it_is_a_producer_too_but_deprecated() -> None:
    """It hears engines like one, and refuses what one refuses."""
    plugin = PLUGIN.make("precise", PrecisePrefixCacheParameters())
    for contract in (DataProducer, PreRequest, KvEventConsumer, Scorer):
        assert isinstance(plugin, contract)
    assert PLUGIN.stability is Stability.DEPRECATED
    with pytest.raises(ValueError, match="duration"):
        PLUGIN.make("precise", PrecisePrefixCacheParameters(speculative_ttl="soon"))
