"""approx-prefix-cache-producer: guess which endpoint holds how much of the prompt.

It remembers the hashes of the prompt blocks that it sent to each endpoint (`pre_request`, before
the endpoint answers) and matches each new prompt against that memory. A request that fails (status
400 and above), or is evicted, leaves none of the blocks that it alone added; one that the proxy
retried elsewhere counts for the endpoint that served it. A request that ends before any response
was seen counts as read: it looks the same behind a proxy that shows no responses.

Block size: with `autoTune` that of the first candidate that reports one, else `blockSizeTokens`,
and never below 64 tokens. Memory per endpoint: with `autoTune` the number of blocks that fit into
its KV cache, `num_kv_blocks · block_size / 64`, else `lruCapacityPerServer`. (The reference takes
num_kv_blocks unscaled, and so may remember four times more than the GPU holds.) Impossible reports
are ignored. Prompt length considered: `maxPrefixTokensToMatch`, else `maxPrefixBlocksToMatch`
blocks; both 0: all of it.

A match is contiguous from the first block; the matches of several prompts are added. Different
models, adapters or salts share nothing: every hash includes the target model, the request's cache
salt and a seed, which is random for each process unless `hashSeed` is given. Replicas report to
each other what they sent where, and agree on a seed for that (`picker.framework.replicas`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.framework.registry import NonNegativeInt, Parameters, PluginType, PositiveInt
from picker.framework.replicas import ReportPlacement
from picker.framework.services import NO_SERVICES, Services
from picker.plugins._shared.stages import prompt_readers
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.block_hash import BYTES_PER_HASH, BlockHasher, BlockHashes
from picker.prefix.index import Addition, PrefixIndex
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Candidate,
    Candidates,
    EndpointMetrics,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    SchedulingResult,
    Usage,
)

MIN_BLOCK_SIZE_TOKENS = 64  # the floor of the reference
MAX_REPORTED_BLOCK_SIZE_TOKENS = 65_536  # a larger one is a wrong report
MAX_REPORTED_CAPACITY = 2**20  # blocks, 64 MiB of memory
MAX_PROMPTS = 256  # a request may have a hundred thousand, of one token each
_FIRST_ERROR = 400
# Ends by the picker itself, before any response.
_UNREAD = (FinishCause.REFUSED, FinishCause.EVICTED)


class ApproxPrefixCacheParameters(Parameters, frozen=True):
    """The parameters; blocks have at least 64 tokens, even if fewer are configured."""

    auto_tune: bool = True
    block_size_tokens: NonNegativeInt = MIN_BLOCK_SIZE_TOKENS
    block_size: int = 0  # deprecated
    max_prefix_tokens_to_match: NonNegativeInt = 131072
    max_prefix_blocks_to_match: NonNegativeInt = 2048
    lru_capacity_per_server: PositiveInt = 31250
    hash_seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        written = self.block_size_tokens
        if 0 < written < MIN_BLOCK_SIZE_TOKENS:
            msgspec.structs.force_setattr(self, "block_size_tokens", MIN_BLOCK_SIZE_TOKENS)
            if self.block_size == written:
                msgspec.structs.force_setattr(self, "block_size", MIN_BLOCK_SIZE_TOKENS)

    @property
    def without_effect(self) -> Mapping[str, str]:
        if not self.max_prefix_tokens_to_match:
            return {}
        limit = f"maxPrefixTokensToMatch ({self.max_prefix_tokens_to_match}) is the limit"
        return {"maxPrefixBlocksToMatch": limit}


class _Hashed(msgspec.Struct, eq=False):
    """The block hashes of one request, for `index`, and the additions that may be withdrawn."""

    prompts: tuple[BlockHashes, ...]
    block_size_tokens: int
    index: PrefixIndex
    additions: list[Addition] = []


class ApproxPrefixCacheProducer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(
        self,
        name: str,
        parameters: ApproxPrefixCacheParameters,
        services: Services = NO_SERVICES,
        max_reported_capacity: int = MAX_REPORTED_CAPACITY,
    ) -> None:
        _check(parameters)
        self._parameters = parameters
        self._max_tokens = parameters.max_prefix_tokens_to_match
        self._max_blocks = parameters.max_prefix_blocks_to_match
        self._max_reported_capacity = max_reported_capacity
        given = parameters.hash_seed
        self._seed = services.hash_seed if given is None else given
        self._index = PrefixIndex()
        self._hasher = BlockHasher(MIN_BLOCK_SIZE_TOKENS, self._seed)
        self._report: ReportPlacement | None = None
        self._match_key = match_info_key(name)
        self._hashed_key: DataKey[_Hashed] = DataKey("BlockHashes", name)
        self.produces = (self._match_key,)

    @property
    def index_size(self) -> int:
        """The number of remembered blocks; a block counts once for every endpoint that has it."""
        return len(self._index)

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        if not request.prompts:
            return request
        block_size = self._block_size(candidates)
        limit = self._max_blocks or None
        if self._max_tokens:
            limit = max(1, self._max_tokens // block_size)
        model, salt = request.target_model, request.body.cache_salt
        asked = request.prompts[:MAX_PROMPTS]
        if self._hasher.block_size_tokens != block_size:
            self._hasher = BlockHasher(block_size, self._seed)
        prompts = self._hasher.prompts(asked, model, salt, limit)
        match = self._index.match
        matched = match(prompts[0]) if len(prompts) == 1 else _sums(map(match, prompts))
        total = sum(map(len, prompts)) // BYTES_PER_HASH
        attributes[self._hashed_key] = _Hashed(prompts, block_size, self._index)
        attributes[self._match_key] = PrefixCacheMatchInfo(total, block_size, matched)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Remember the prompt for the first endpoints of the primary profile and of `prefill`."""
        hashed = attributes.get(self._hashed_key)
        # The seed may have changed since `produce`: these hashes would match nothing later.
        if hashed is None or hashed.index is not self._index:
            return
        for _, candidate in prompt_readers(result):
            addition = Addition(candidate.endpoint.key)
            hashed.additions.append(addition)
            self._record(candidate, hashed, addition)

    def response_head(self, flight: Flight, head: ResponseHead) -> None:
        """Keep what an endpoint answers; withdraw what failed or another endpoint served."""
        hashed = flight.attributes.get(self._hashed_key)
        if hashed is None or not hashed.additions:
            return
        is_error = (head.status or 0) >= _FIRST_ERROR or head.reached_no_endpoint
        # A gRPC response that consists of headers alone has failed.
        if is_error or head.headers.get("grpc-status", "0") != "0":
            self._close(hashed, is_read=False)
            return
        server, result = head.served_by, flight.result
        if server is not None and server != result.endpoints[0].host_port:
            self._move(hashed, result, server)
        self._close(hashed, is_read=True)

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        hashed = flight.attributes.get(self._hashed_key)
        if hashed is not None and hashed.additions:
            self._close(hashed, is_read=cause not in _UNREAD)

    def endpoint_removed(self, key: str) -> None:
        self._index.remove(key)

    @property
    def hash_seed(self) -> int:
        return self._seed

    def use_hash_seed(self, seed: int) -> None:
        if self._parameters.hash_seed is None and seed != self._seed:
            self._seed = seed
            self._index = PrefixIndex()
            self._hasher = BlockHasher(self._hasher.block_size_tokens, seed)

    def report_placements(self, report: ReportPlacement | None) -> None:
        self._report = report

    def placed_elsewhere(self, key: str, hashes: BlockHashes, capacity: int) -> None:
        """Remember a prompt that another replica sent to endpoint `key`."""
        # A peer's message must not make this replica remember more than any endpoint can hold.
        bound = max(self._max_reported_capacity, self._parameters.lru_capacity_per_server)
        self._index.record(key, hashes, min(capacity, bound))

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the index contradicts itself."""
        self._index.check_integrity()

    def _record(self, candidate: Candidate, hashed: _Hashed, addition: Addition | None) -> None:
        capacity = self._capacity(candidate.metrics, hashed.block_size_tokens)
        key = candidate.endpoint.key
        for prompt in hashed.prompts:
            self._index.record(key, prompt, capacity, addition)
            if self._report is not None:
                self._report(key, prompt, capacity)

    def _close(self, hashed: _Hashed, is_read: bool) -> None:
        for addition in hashed.additions:
            if is_read:
                hashed.index.confirm(addition)
            else:
                hashed.index.withdraw(addition)
        hashed.additions.clear()

    def _move(self, hashed: _Hashed, result: SchedulingResult, server: str) -> None:
        """Record the prompt for the endpoint that served it instead of the one picked for it."""
        hashed.index.withdraw(hashed.additions[0])
        if hashed.index is self._index:
            profile = result.profiles[result.primary_profile]
            for one in (*profile.picked, *profile.scored):
                if one.candidate.endpoint.host_port == server:
                    self._record(one.candidate, hashed, None)
                    break

    def _block_size(self, candidates: Candidates) -> int:
        configured = self._parameters.block_size_tokens
        if self._parameters.auto_tune:
            for candidate in candidates:
                metrics = candidate.metrics
                size = 0 if metrics is None else metrics.block_size_tokens or 0
                if 0 < size <= MAX_REPORTED_BLOCK_SIZE_TOKENS:
                    configured = size
                    break
        return max(MIN_BLOCK_SIZE_TOKENS, configured)

    def _capacity(self, metrics: EndpointMetrics | None, block_size: int) -> int:
        if self._parameters.auto_tune and metrics is not None and metrics.num_kv_blocks:
            size = metrics.block_size_tokens or 0
            if 0 < size <= MAX_REPORTED_BLOCK_SIZE_TOKENS:
                held = metrics.num_kv_blocks * size // block_size
                return min(max(1, held), self._max_reported_capacity)
        return self._parameters.lru_capacity_per_server


def _sums(matches: Iterable[Mapping[str, int]]) -> dict[str, int]:
    summed: Counter[str] = Counter()
    for one in matches:
        summed.update(one)
    return dict(summed)


def _check(parameters: ApproxPrefixCacheParameters) -> None:
    size, old = parameters.block_size_tokens, parameters.block_size
    if not size and not parameters.auto_tune:
        raise ValueError(f"blockSizeTokens must be positive without autoTune, got {size}")
    if old not in (0, size):
        raise ValueError(f"blockSize is deprecated and must be given as blockSizeTokens: {old}")


PLUGIN = PluginType(
    "approx-prefix-cache-producer", ApproxPrefixCacheProducer, default_for=(MATCH_INFO,)
)
