"""dynamo-cost-scorer: prefer endpoints with the least work, in blocks, for prompts and decoding.

With blocks of B tokens as the prefix producer has them, p the tokens of prompts in flight at the
endpoint, n those of this prompt, b = ⌈n / B⌉ and c the blocks of it that are cached there:

    cost    = prefillLoadScale (1) · max(0, (p + n) / B − credits) + decode + active
    credits = overlapScoreCredit (1) · decay · gpu + lower,   c = gpu + lower
    decay   = 1 / (1 + overlapScoreCreditDecay (0) · (p − least p) / B / b)
    decode  = tokens in KV blocks in use there / B + b
    active  = decodeActiveRequestWeight (0) · requests in flight
    score   = (greatest cost − cost) / (greatest cost − least cost);   1.0 when all are equal

Use it with softmax-picker, whose `temperature` then is Dynamo's. Blocks in lower tiers count by the
producer's `kvCacheBackendConfigs` (in Dynamo cpu 0.75, disk 0.25), and do not decay; where no tiers
are known, all cached blocks are on the GPU. The load in flight is that of an
inflight-load-producer: give it the same `prefixMatchInfoProducerName`. It counts a prompt until the
first piece of its response, or, where the proxy shows no bodies, until the end. KV blocks in use
are those that the endpoint reports; for an endpoint that only lacks these, the mean of the others.
Dynamo counts the blocks that it assigned itself. An endpoint whose load is unknown (never scraped,
or scrapes went stale) scores 0.0 beside others whose load is known. Without a prompt or a finding:
0.0 for all.

Source: NVIDIA Dynamo, `lib/kv-router/src/scheduling/selector.rs` and its documentation ("Routing
Concepts", `--router-kv-overlap-score-credit`, `-decay`, `--router-prefill-load-scale`).
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.attributes import Attributes, InFlightLoad, inflight_load_key
from picker.framework.registry import (
    NonNegativeFloat,
    Parameters,
    PluginType,
    Share,
    configured,
)
from picker.plugins._shared.load_signals import (
    least_first,
    unknown_among_known,
    with_neutral,
)
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, Candidates, InferenceRequest

GPU = "gpu"


class DynamoCostParameters(Parameters, frozen=True):
    overlap_score_credit: Share = 1.0
    overlap_score_credit_decay: NonNegativeFloat = 0.0
    prefill_load_scale: NonNegativeFloat = 1.0
    decode_active_request_weight: NonNegativeFloat = 0.0
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    in_flight_load_producer_name: str = "inflight-load-producer"


class DynamoCostScorer:
    """Scores by the work that an endpoint would have. Stateless."""

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
        """The cost in blocks, without those in use; `least` is the least p of all candidates."""
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
    """Tokens that fit into the KV blocks in use; None without a report."""
    metrics = candidate.metrics or candidate.last_metrics
    if metrics is None or not metrics.num_kv_blocks or not metrics.block_size_tokens:
        return None
    usage = metrics.kv_cache_usage
    return None if usage is None else usage * metrics.num_kv_blocks * metrics.block_size_tokens


PLUGINS = (PluginType("dynamo-cost-scorer", DynamoCostParameters, configured(DynamoCostScorer)),)
