"""Simultaneous requests with a common prefix, placed together.

burst-prefix-cache-producer: send simultaneous requests with a common prefix together. When many
requests with the same new prompt arrive at once, no endpoint has seen it before, and each request
would go to the least busy endpoint. So requests wait up to `windowDurationMs` for each other and
are then distributed over the endpoints together. Each gets

    match = all its blocks at the endpoint that it is assigned to, 0 elsewhere

for a prefix-cache-scorer whose `prefixMatchInfoProducerName` is this plugin. A request that finds
`maxBatchSize` (-1: any number) others in the window opens the next one. The producer remembers
nothing: configure an approx-prefix-cache-producer for that.

1. Requests that begin with the same `minColocateBlocks` (0: one) blocks of `blockSizeTokens` and
   may go to the same endpoints form a group: one that goes elsewhere would make another endpoint
   compute the beginning, too. Blocks beyond `maxPrefixTokensToMatch` (0: 2048 blocks) are ignored.
2. Groups are placed whole, the heaviest first, each at the endpoint that has been assigned least;
   among equal endpoints, at the one with the fewest requests in flight, then at the first.
3. An endpoint gets at most `maxPerReplica` (-1: any number) requests of one window. The rest of a
   group overflows to the next endpoint; once all are full, the limit no longer applies.

The weight of a group is, by `balanceBy`, the number of its `requests`, or that of its `tokens` in
blocks that one endpoint has to compute for all of them: blocks that several share count once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from picker.framework.attributes import Attributes
from picker.framework.registry import NonNegativeInt, Parameters, PluginType, PositiveInt, Stability
from picker.framework.services import Services
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.block_hash import BlockHasher, unpacked
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidates, InferenceRequest

MAX_BLOCKS = 2048
SLACK_SECONDS = 1.0  # for an event loop that is busy when the window ends


class BurstPrefixCacheParameters(Parameters, frozen=True):
    window_duration_ms: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    max_per_replica: int = -1
    block_size_tokens: PositiveInt = 64
    max_prefix_tokens_to_match: NonNegativeInt = 0
    min_colocate_blocks: NonNegativeInt = 0
    max_batch_size: int = 1000
    balance_by: Literal["requests", "tokens"] = "requests"


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """The chained block hashes of a request, and the endpoints that may serve it, each with its
    number of requests in flight.
    """

    blocks: tuple[int, ...]
    endpoints: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BurstRules:
    """The blocks that a group shares, the requests per endpoint, and the unit of weight."""

    colocate_blocks: int = 1
    max_per_endpoint: int | None = None
    weigh_blocks: bool = False


def assign(requests: Sequence[BurstRequest], rules: BurstRules) -> list[str]:
    """Return an endpoint for each request, in the order of the requests."""
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_alike(request, index, rules), []).append(index)
    weighed = [(_weight(requests, members, rules), members) for members in groups.values()]
    weighed.sort(key=lambda one: -one[0])  # stable: of equal groups the first
    placed: dict[int, str] = {}
    load = _Load()
    for _, members in weighed:
        _place(requests, members, rules, load, placed)
    return [placed[index] for index in range(len(requests))]


class _Load:
    def __init__(self) -> None:
        self.weight: dict[str, int] = {}
        self.count: dict[str, int] = {}

    def add(self, key: str, weight: int, count: int) -> None:
        self.weight[key] = self.weight.get(key, 0) + weight
        self.count[key] = self.count.get(key, 0) + count

    def least(self, endpoints: Sequence[tuple[str, int]], limit: int | None) -> tuple[str, int]:
        """Return the next endpoint and how many requests it has room for; -1 means any number."""
        open_ones = [one for one in endpoints if limit is None or self.count.get(one[0], 0) < limit]
        candidates = open_ones or endpoints
        key, _ = min(candidates, key=lambda one: (self.weight.get(one[0], 0), one[1]))
        if limit is None:
            return key, -1
        return key, limit - self.count.get(key, 0) if open_ones else 1


def _alike(request: BurstRequest, index: int, rules: BurstRules) -> object:
    shared = max(1, rules.colocate_blocks)
    if len(request.blocks) < shared:
        return index  # too short to share anything
    # Hashes are chained: this one represents all blocks before it.
    return request.blocks[shared - 1], tuple(key for key, _ in request.endpoints)


def _weight(requests: Sequence[BurstRequest], members: Sequence[int], rules: BurstRules) -> int:
    if not rules.weigh_blocks:
        return len(members)
    return len({block for index in members for block in requests[index].blocks})


def _place(
    requests: Sequence[BurstRequest],
    members: Sequence[int],
    rules: BurstRules,
    load: _Load,
    placed: dict[int, str],
) -> None:
    left = list(members)
    while left:
        key, room = load.least(requests[left[0]].endpoints, rules.max_per_endpoint)
        part = left if room < 0 else left[:room]
        for index in part:
            placed[index] = key
        load.add(key, _weight(requests, part, rules), len(part))
        left = left[len(part) :]


class _Burst:
    """The requests of one window."""

    def __init__(self, ends_at_seconds: float) -> None:
        self.ends_at_seconds = ends_at_seconds
        self.members: dict[int, BurstRequest] = {}
        self.assigned: dict[int, str] | None = None
        self._next = 0

    def join(self, request: BurstRequest) -> int:
        """Add a request; return its number."""
        number, self._next = self._next, self._next + 1
        self.members[number] = request
        return number

    def leave(self, number: int) -> None:
        self.members.pop(number, None)

    def endpoint_of(self, number: int, rules: BurstRules) -> str:
        """Return the endpoint of a request. The first call ends the window."""
        if self.assigned is None:
            endpoints = assign(tuple(self.members.values()), rules)
            self.assigned = dict(zip(self.members, endpoints, strict=True))
        return self.assigned[number]


class BurstPrefixCacheProducer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(
        self, name: str, parameters: BurstPrefixCacheParameters, services: Services
    ) -> None:
        _check(parameters)
        self._block_size = parameters.block_size_tokens
        tokens = parameters.max_prefix_tokens_to_match
        self._max_blocks = max(1, tokens // self._block_size) if tokens else MAX_BLOCKS
        self._max_batch = None if parameters.max_batch_size < 0 else parameters.max_batch_size
        limit = parameters.max_per_replica
        self._rules = BurstRules(
            colocate_blocks=max(1, parameters.min_colocate_blocks),
            max_per_endpoint=None if limit < 0 else limit,
            weigh_blocks=parameters.balance_by == "tokens",
        )
        self._window_seconds = parameters.window_duration_ms / 1000
        self._clock = services.clock
        self._hasher = BlockHasher(self._block_size, services.hash_seed)
        self._key = match_info_key(name)
        self._open: _Burst | None = None
        self.timeout_seconds = self._window_seconds + SLACK_SECONDS
        self.produces = (self._key,)

    async def look_up(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        if not request.prompts or not candidates:
            return request
        blocks = self._blocks(request)
        if len(candidates) == 1:
            endpoint = candidates[0].key
        else:
            pool = tuple((one.key, one.inflight_requests) for one in candidates)
            endpoint = await self._together(BurstRequest(blocks, pool))
        info = PrefixCacheMatchInfo(len(blocks), self._block_size, {endpoint: len(blocks)})
        attributes[self._key] = info
        return request

    async def _together(self, request: BurstRequest) -> str:
        burst = self._joined()
        number = burst.join(request)
        try:
            await self._clock.sleep(max(0.0, burst.ends_at_seconds - self._clock.now()))
        except BaseException:  # the client disconnected
            burst.leave(number)
            raise
        if self._open is burst:
            self._open = None
        return burst.endpoint_of(number, self._rules)

    def _joined(self) -> _Burst:
        burst, now = self._open, self._clock.now()
        is_full = burst is not None and len(burst.members) == self._max_batch
        if burst is None or is_full or burst.ends_at_seconds <= now:
            burst = self._open = _Burst(now + self._window_seconds)
        return burst

    def _blocks(self, request: InferenceRequest) -> tuple[int, ...]:
        model, salt = request.target_model, request.body.cache_salt
        prompts = self._hasher.prompts(request.prompts, model, salt, self._max_blocks)
        return unpacked(b"".join(prompts))


def _check(parameters: BurstPrefixCacheParameters) -> None:
    for name, value in (
        ("maxPerReplica", parameters.max_per_replica),
        ("maxBatchSize", parameters.max_batch_size),
    ):
        if value == 0 or value < -1:
            raise ValueError(f"{name} must be positive, or -1 for any number, got {value}")


PLUGINS = (PluginType("burst-prefix-cache-producer", BurstPrefixCacheProducer, Stability.ALPHA),)
