"""Scorers by the part of a prompt that endpoints have cached.

prefix-cache-scorer: prefer endpoints that already hold the beginning of the prompt.

    score = w · min(1, match · B / scale)² + (1 − w) · match / total

with match and total in blocks of B tokens as the prefix producer found them, w =
`matchLengthWeight` (0) and scale = `matchLengthScaleTokens` (8192). Without a finding, and for an
empty prompt, 0.0 for all.

precise-prefix-cache-scorer: a precise-prefix-cache-producer that scores what it finds.

    score = match / total

as prefix-cache-scorer with `matchLengthWeight` 0. Deprecated: configure the producer, and a
prefix-cache-scorer with its name as `prefixMatchInfoProducerName`. The parameters are the
producer's.
"""

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import (
    Parameters,
    PluginType,
    PositiveInt,
    Share,
    Stability,
)
from picker.plugins.producers.precise_prefix_cache_producer import (
    PrecisePrefixCacheParameters,
    PrecisePrefixCacheProducer,
)
from picker.prefix.match import match_info_key
from picker.types import Candidates, InferenceRequest


class PrefixCacheParameters(Parameters, frozen=True):
    match_length_weight: Share = 0.0
    match_length_scale_tokens: PositiveInt = 8192
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"


class PrefixCacheScorer:
    def __init__(self, parameters: PrefixCacheParameters) -> None:
        self._weight = parameters.match_length_weight
        self._scale_tokens = parameters.match_length_scale_tokens
        self._key = match_info_key(parameters.prefix_match_info_producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        info = attributes.get(self._key)
        if info is None or info.total_blocks == 0 or not info.match_blocks:
            return [0.0] * len(candidates)
        matched = info.match_blocks
        # Matches have few distinct lengths, so each length is rated once.
        rated = {
            length: self._rate(length, info.total_blocks, info.block_size_tokens)
            for length in {0, *matched.values()}
        }
        # `candidate.key` would take twice as long.
        return [rated[matched.get(candidate.endpoint.key, 0)] for candidate in candidates]

    def _rate(self, match: int, total: int, block_size_tokens: int) -> float:
        length = min(1.0, match * block_size_tokens / self._scale_tokens)
        return self._weight * length * length + (1.0 - self._weight) * match / total


class PrecisePrefixCacheScorer(PrecisePrefixCacheProducer):
    def __init__(self, name: str, parameters: PrecisePrefixCacheParameters) -> None:
        super().__init__(name, parameters)
        self._scorer = PrefixCacheScorer(
            PrefixCacheParameters(prefix_match_info_producer_name=name)
        )

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        return self._scorer.score(request, candidates, attributes)


PLUGINS = (
    PluginType("prefix-cache-scorer", PrefixCacheScorer),
    PluginType("precise-prefix-cache-scorer", PrecisePrefixCacheScorer, Stability.DEPRECATED),
)
