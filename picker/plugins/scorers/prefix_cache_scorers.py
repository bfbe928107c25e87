"""Scorers by the part of a prompt that endpoints have cached.

prefix-cache-scorer: prefer endpoints that hold the beginning of the prompt.

    score = w · min(1, match · B / scale)² + (1 − w) · match / total

with match and total in blocks of B tokens as the prefix producer found them, w =
`matchLengthWeight` and scale = `matchLengthScaleTokens`; 0.0 without a finding or a prompt.

precise-prefix-cache-scorer: a precise-prefix-cache-producer that also scores what it finds.

    score = match / total

Deprecated: configure the producer, and a prefix-cache-scorer with its name as
`prefixMatchInfoProducerName`.

no-hit-lru-scorer: spread uncached prompts, least recently used endpoints first.

A decision is cold when no candidate has a block of the prompt. Of n candidates,

    score = 0.5                      each, when the decision is not cold
            1 − rank / (n − 1)       when it is; 1.0 for n = 1

Endpoints that got no cold request yet have the first ranks, in the order of the candidates; the
others follow, least recently used first. Before a cold request leaves, the endpoints picked by the
primary profile and the profile `prefill` become the most recently used of at most `lruSize`. (In
the reference, a used endpoint's rank counts used endpoints that are not candidates.)
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, PositiveInt, Share, Stability
from picker.plugins._shared.stages import prompt_readers
from picker.plugins.producers.precise_prefix_cache_producer import (
    PrecisePrefixCacheParameters,
    PrecisePrefixCacheProducer,
)
from picker.prefix.match import match_info_key
from picker.types import Candidate, Candidates, InferenceRequest, SchedulingResult


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


WARM = 0.5


class NoHitLruParameters(Parameters, frozen=True):
    lru_size: PositiveInt = 1024
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""

    @property
    def without_effect(self) -> Mapping[str, str]:
        older = "prefixMatchInfoProducerName says whose matches count"
        return {"prefixPluginType": older, "prefixPluginName": older}


class NoHitLruScorer:
    def __init__(self, parameters: NoHitLruParameters) -> None:
        self._size = parameters.lru_size
        self._key = match_info_key(parameters.prefix_match_info_producer_name)
        self._used: OrderedDict[str, None] = OrderedDict()
        self.consumes = (self._key,)

    @property
    def used(self) -> tuple[str, ...]:
        """The keys of the endpoints that got cold requests, least recently used first."""
        return tuple(self._used)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        if not self._is_cold(candidates, attributes):
            return [WARM] * len(candidates)
        if len(candidates) == 1:
            return [1.0]
        # Ranks count candidates only: endpoints that filters removed leave no gap.
        present = {candidate.key for candidate in candidates}
        never = [candidate.key for candidate in candidates if candidate.key not in self._used]
        order = [*never, *(key for key in self._used if key in present)]
        last = len(candidates) - 1
        score = {key: 1.0 - rank / last for rank, key in enumerate(order)}
        return [score[candidate.key] for candidate in candidates]

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Remember the endpoint of a request that is cold among the candidates of its profile."""
        for profile, picked in prompt_readers(result):
            seen = (scored.candidate for scored in chain(profile.picked, profile.scored))
            if self._is_cold(seen, attributes):
                self._use(picked.key)

    def endpoint_removed(self, key: str) -> None:
        self._used.pop(key, None)

    def _is_cold(self, candidates: Iterable[Candidate], attributes: Attributes) -> bool:
        info = attributes.get(self._key)
        if info is None or not info.match_blocks:
            return True
        return not any(info.match_blocks.get(candidate.key, 0) > 0 for candidate in candidates)

    def _use(self, key: str) -> None:
        self._used[key] = None
        self._used.move_to_end(key)
        if len(self._used) > self._size:
            self._used.popitem(last=False)


PLUGINS = (
    PluginType("prefix-cache-scorer", PrefixCacheScorer),
    PluginType("precise-prefix-cache-scorer", PrecisePrefixCacheScorer, Stability.DEPRECATED),
    PluginType("no-hit-lru-scorer", NoHitLruScorer),
)
