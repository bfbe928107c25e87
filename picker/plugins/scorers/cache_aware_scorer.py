"""cache-aware-scorer: the endpoint that has most of the prompt, unless the load is too uneven.

Loads are this picker's own requests in flight, max and min those of the candidates.

    uneven  = max − min > balanceAbsThreshold (64) and max > balanceRelThreshold (1.5) · min
    matched = those with the longest match, if match / total > cacheThreshold (0.3); not if uneven
    score   = (2 + s) / 3 for the matched, s / 3 for others; s = (max − load) / (max − min)

So max-score-picker takes a matched endpoint, the one with the least load first, and without any the
one with the least load. Equal loads: s = 1. An endpoint whose load is unknown (never scraped, or
scrapes went stale) scores 0.0 beside others whose load is known, and is not matched.

The formula and the defaults are those of `cache_aware` in sglang-router (`--cache-threshold`,
`--balance-abs-threshold`, `--balance-rel-threshold`), which leaves out unhealthy workers in the
same way. There matches are counted in characters by a tree of its own; here they are blocks, of the
producer `prefixMatchInfoProducerName`. Older versions send an unmatched prompt to the worker with
the smallest tree, later ones to the one with the least load.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes
from picker.framework.registry import (
    NonNegativeFloat,
    NonNegativeInt,
    Parameters,
    PluginType,
    Share,
    configured,
)
from picker.plugins._shared.load_signals import least_first, unknown_among_known
from picker.prefix.match import match_info_key
from picker.types import Candidates, InferenceRequest


class CacheAwareParameters(Parameters, frozen=True):
    cache_threshold: Share = 0.3
    balance_abs_threshold: NonNegativeInt = 64
    balance_rel_threshold: NonNegativeFloat = 1.5
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"


class CacheAwareScorer:
    """Scores by match, or by load if it is uneven. Stateless."""

    def __init__(self, parameters: CacheAwareParameters) -> None:
        self._parameters = parameters
        self._key = match_info_key(parameters.prefix_match_info_producer_name)
        self.consumes = (self._key,)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        loads = [
            None if unknown else candidate.inflight_requests
            for candidate, unknown in zip(candidates, unknown_among_known(candidates), strict=True)
        ]
        matched = self._matched(candidates, loads, attributes)
        return [
            (2.0 + score) / 3.0 if candidate.key in matched else score / 3.0
            for candidate, score in zip(candidates, least_first(loads), strict=True)
        ]

    def _matched(
        self, candidates: Candidates, loads: Sequence[int | None], attributes: Attributes
    ) -> frozenset[str]:
        info = attributes.get(self._key)
        known = [load for load in loads if load is not None]
        if info is None or not info.total_blocks or not known or self._is_uneven(known):
            return frozenset()
        matches = {
            candidate.key: info.match_blocks.get(candidate.key, 0)
            for candidate, load in zip(candidates, loads, strict=True)
            if load is not None
        }
        longest = max(matches.values())
        if longest / info.total_blocks <= self._parameters.cache_threshold:
            return frozenset()
        return frozenset(key for key, match in matches.items() if match == longest)

    def _is_uneven(self, loads: Sequence[int]) -> bool:
        most, least = max(loads), min(loads)
        return (
            most - least > self._parameters.balance_abs_threshold
            and most > self._parameters.balance_rel_threshold * least
        )


PLUGIN = PluginType("cache-aware-scorer", CacheAwareParameters, configured(CacheAwareScorer))
