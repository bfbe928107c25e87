"""consistent-hashing-scorer: the same key to the same endpoint, unless it has too much to do.

The key is the header `headerName` of the request, else the model, the cache salt and the first
`prefixTokens` (256) tokens of the prompt. Endpoints are in the order of

    xxh3(endpoint, seed = xxh3(key)), descending

(rendezvous hashing): when one of n leaves, only its keys move; one that joins takes 1 / (n + 1) of
the keys from the others. The next in the order are the endpoints that this request would take over
the bound on their load,

    ⌈loadFactor (1.25) · (m + 1) / n⌉,   m = this picker's requests in flight at all n candidates

which can never be all of them; the last, while another's load is known, are endpoints whose load is
unknown (never scraped, or scrapes went stale). Rank r of this order scores 1 − r / (n − 1); 1.0 for
n = 1. Use it with max-score-picker. Without a key: 0.0 for all.

Sources: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998; Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018. Candidates differ from
request to request, so there is no ring of virtual nodes to maintain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType, PositiveInt, configured
from picker.plugins._shared.load_signals import unknown_among_known
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.types import BYTES_PER_TOKEN, Candidates, InferenceRequest


class ConsistentHashingParameters(Parameters, frozen=True):
    header_name: str = ""
    prefix_tokens: PositiveInt = 256
    load_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.25


class ConsistentHashingScorer:
    """Scores by the rank of an endpoint for the request's key. Stateless."""

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
        """The candidates' indexes, best first."""
        total = sum(candidate.inflight_requests for candidate in candidates)
        bound = math.ceil(self._factor * (total + 1) / len(candidates))
        unknown = unknown_among_known(candidates)

        def place(index: int) -> tuple[bool, bool, int]:
            one = candidates[index]
            digest = xxhash.xxh3_64_intdigest(one.key.encode(), key)
            return unknown[index], one.inflight_requests >= bound, -digest

        return sorted(range(len(candidates)), key=place)


PLUGIN = PluginType(
    "consistent-hashing-scorer", ConsistentHashingParameters, configured(ConsistentHashingScorer)
)
