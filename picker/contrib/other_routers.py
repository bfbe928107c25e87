"""Formulas of other routers: sglang-router, rendezvous hashing with bounded loads, NVIDIA Dynamo.

An endpoint whose load is unknown scores 0.0 beside others whose load is known.

cache-aware-scorer: the endpoint with most of the prompt, unless load is too uneven.

Loads are this picker's own requests in flight, max and min those of the candidates.

    uneven  = max − min > balanceAbsThreshold and max > balanceRelThreshold · min
    matched = those with the longest match, if match / total > cacheThreshold; not if uneven
    score   = (2 + s) / 3 for the matched, s / 3 for others; s = (max − load) / (max − min)

So max-score-picker takes the matched endpoint with the least load, or without a match the endpoint
with the least load. Equal loads: s = 1.

The formula and the defaults are those of `cache_aware` in sglang-router (`--cache-threshold`,
`--balance-abs-threshold`, `--balance-rel-threshold`), where matches are counted in characters by a
tree of its own, and older versions send an unmatched prompt to the worker with the smallest tree.

consistent-hashing-scorer: the same key to the same endpoint, unless it has too much to do.

The key is the header `headerName` of the request, else the model, the cache salt and the first
`prefixTokens` tokens of the prompt. Endpoints are ordered by

    xxh3(endpoint, seed = xxh3(key)), descending

(rendezvous hashing): when one of n leaves, only its keys move; one that joins takes 1 / (n + 1) of
the keys from the others. After all these come the endpoints that this request would push above
the bound on their load,

    ⌈loadFactor · (m + 1) / n⌉,   m = this picker's requests in flight at all n candidates

which can never be all of them; last come those of unknown load. Rank r of this order scores 1 −
r / (n − 1); 1.0 for n = 1. Use it with max-score-picker. Without a key: 0.0 for all.

Sources: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998; Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018. Candidates differ from
request to request, so there is no ring of virtual nodes to maintain.

dynamo-cost-scorer: prefer endpoints with the least work, in blocks.

With blocks of B tokens as the prefix producer has them, p the tokens of prompts in flight at the
endpoint, n those of this prompt, b = ⌈n / B⌉ and c the blocks of it that are cached there:

    cost    = prefillLoadScale · max(0, (p + n) / B − credits) + decode + active
    credits = overlapScoreCredit · decay · gpu + lower,   c = gpu + lower
    decay   = 1 / (1 + overlapScoreCreditDecay · (p − least p) / B / b)
    decode  = tokens in KV blocks in use there / B + b
    active  = decodeActiveRequestWeight · requests in flight
    score   = (greatest cost − cost) / (greatest cost − least cost);   1.0 when all are equal

Use it with softmax-picker, whose `temperature` then is Dynamo's. Blocks in lower tiers count by the
producer's `kvCacheBackendConfigs` (in Dynamo cpu 0.75, disk 0.25), and do not decay; where no tiers
are known, all cached blocks are on the GPU. The load in flight is that of an
inflight-load-producer: give it the same `prefixMatchInfoProducerName`. KV blocks in use are those
that the endpoint reports, else the mean of the others; Dynamo counts the blocks that it assigned
itself. Without a prompt or the producer's result: 0.0 for all.

Source: NVIDIA Dynamo, `lib/kv-router/src/scheduling/selector.rs` and its documentation ("Routing
Concepts", `--router-kv-overlap-score-credit`, `-decay`, `--router-prefill-load-scale`).
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from picker.framework.attributes import Attributes, InFlightLoad, inflight_load_key
from picker.framework.registry import (
    NonNegativeFloat,
    NonNegativeInt,
    Parameters,
    PluginType,
    PositiveInt,
    Share,
)
from picker.plugins._shared.load_signals import least_first, unknown_among_known, with_neutral
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import BYTES_PER_TOKEN, Candidate, Candidates, InferenceRequest


class CacheAwareParameters(Parameters, frozen=True):
    cache_threshold: Share = 0.3
    balance_abs_threshold: NonNegativeInt = 64
    balance_rel_threshold: NonNegativeFloat = 1.5
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"


class CacheAwareScorer:
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


class ConsistentHashingParameters(Parameters, frozen=True):
    header_name: str = ""
    prefix_tokens: PositiveInt = 256
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25


class ConsistentHashingScorer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, parameters: ConsistentHashingParameters) -> None:
        self._header = parameters.header_name.lower()
        self._prefix_bytes = parameters.prefix_tokens * BYTES_PER_TOKEN
        self._factor = parameters.load_factor

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        key = self._key(request)
        if key is None or not candidates:
            return [0.0] * len(candidates)
        last = len(candidates) - 1
        scores = [1.0] * len(candidates)
        for rank, index in enumerate(self._order(key, candidates)):
            scores[index] = 1.0 - rank / last if last else 1.0
        return scores

    def _key(self, request: InferenceRequest) -> int | None:
        value = request.headers.get(self._header) if self._header else None
        if value:
            return xxhash.xxh3_64_intdigest(value.encode(errors="surrogatepass"))
        if not request.prompts or not request.prompts[0]:
            return None
        scope = f"{request.target_model}\0{request.body.cache_salt}\0"
        beginning = request.prompts[0][: self._prefix_bytes]
        return xxhash.xxh3_64_intdigest(scope.encode(errors="surrogatepass") + beginning)

    def _order(self, key: int, candidates: Candidates) -> list[int]:
        """Return the candidates' indexes, best first."""
        total = sum(candidate.inflight_requests for candidate in candidates)
        bound = math.ceil(self._factor * (total + 1) / len(candidates))
        unknown = unknown_among_known(candidates)

        def place(index: int) -> tuple[bool, bool, int]:
            one = candidates[index]
            digest = xxhash.xxh3_64_intdigest(one.key.encode(), key)
            return unknown[index], one.inflight_requests >= bound, -digest

        return sorted(range(len(candidates)), key=place)


GPU = "gpu"


class DynamoCostParameters(Parameters, frozen=True):
    overlap_score_credit: Share = 1.0
    overlap_score_credit_decay: NonNegativeFloat = 0.0
    prefill_load_scale: NonNegativeFloat = 1.0
    decode_active_request_weight: NonNegativeFloat = 0.0
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    in_flight_load_producer_name: str = "inflight-load-producer"


class DynamoCostScorer:
    def __init__(self, parameters: DynamoCostParameters) -> None:
        self._parameters = parameters
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._load_key = inflight_load_key(parameters.in_flight_load_producer_name)
        self.consumes = (self._match_key, self._load_key)

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        match, load = attributes.get(self._match_key), attributes.get(self._load_key)
        if match is None or load is None or not request.num_tokens:
            return [0.0] * len(candidates)
        least = min((load.tokens(candidate.key) for candidate in candidates), default=0)
        unknown = unknown_among_known(candidates)
        decoding = with_neutral(list(map(_kv_tokens, candidates)), unknown)
        return least_first(
            [
                None
                if is_unknown
                else self._cost(candidate, request.num_tokens, match, load, least)
                + (tokens or 0.0) / match.block_size_tokens
                for candidate, tokens, is_unknown in zip(candidates, decoding, unknown, strict=True)
            ]
        )

    def _cost(
        self,
        candidate: Candidate,
        num_tokens: int,
        match: PrefixCacheMatchInfo,
        load: InFlightLoad,
        least: int,
    ) -> float:
        """Return the cost in blocks, without the KV blocks in use; `least` is the smallest p of all
        candidates.
        """
        size, parameters = match.block_size_tokens, self._parameters
        own, blocks = load.tokens(candidate.key), -(-num_tokens // match.block_size_tokens)
        excess = (own - least) / size / blocks
        decay = 1.0 / (1.0 + parameters.overlap_score_credit_decay * excess)
        cached = match.match_blocks.get(candidate.key, 0)
        tiers = match.tier_blocks.get(candidate.key)
        device = cached if tiers is None else min(cached, tiers.get(GPU, 0))
        credit = parameters.overlap_score_credit * decay * device + cached - device
        prefill = max(0.0, (own + num_tokens) / size - credit)
        active = parameters.decode_active_request_weight * candidate.inflight_requests
        return parameters.prefill_load_scale * prefill + blocks + active


def _kv_tokens(candidate: Candidate) -> float | None:
    """Return how many tokens fit into the KV blocks in use; None without a report."""
    metrics = candidate.metrics or candidate.last_metrics
    if metrics is None or not metrics.num_kv_blocks or not metrics.block_size_tokens:
        return None
    usage = metrics.kv_cache_usage
    return None if usage is None else usage * metrics.num_kv_blocks * metrics.block_size_tokens


PLUGINS = (
    PluginType("cache-aware-scorer", CacheAwareScorer),
    PluginType("consistent-hashing-scorer", ConsistentHashingScorer),
    PluginType("dynamo-cost-scorer", DynamoCostScorer),
)
