"""precise-prefix-cache-scorer: a precise-prefix-cache-producer that scores what it finds.

    score = match / total

as prefix-cache-scorer has it with `matchLengthWeight` 0. Deprecated: configure the producer, and a
prefix-cache-scorer with its name as `prefixMatchInfoProducerName`. The parameters are the
producer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import PluginType, Stability, named
from picker.plugins.producers.precise_prefix_cache_producer import (
    PrecisePrefixCacheParameters,
    PrecisePrefixCacheProducer,
)
from picker.plugins.scorers.prefix_cache_scorer import PrefixCacheParameters, PrefixCacheScorer
from picker.types import Candidates, InferenceRequest


class PrecisePrefixCacheScorer(PrecisePrefixCacheProducer):
    """A producer that also scores what it finds."""

    def __init__(self, name: str, parameters: PrecisePrefixCacheParameters) -> None:
        """Raises `ValueError` as the producer does."""
        super().__init__(name, parameters)
        self._scorer = PrefixCacheScorer(
            PrefixCacheParameters(prefix_match_info_producer_name=name)
        )

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return self._scorer.score(request, candidates, attributes)


PLUGIN = PluginType(
    "precise-prefix-cache-scorer",
    PrecisePrefixCacheParameters,
    named(PrecisePrefixCacheScorer),
    stability=Stability.DEPRECATED,
)
