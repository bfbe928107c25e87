"""p2p-source-producer: name an endpoint to copy the prompt's KV from.

The computing endpoint is the first one of the profile `prefillProfileName` if that ran, else of the
primary one. A peer is another candidate whose cached tokens in the CPU tier exceed those of the
endpoint by at least `minCachedTokenDelta`, as `prefixMatchInfoProducerName` found them (only
engines themselves know their tiers). Of the peers within one block of the best, one is drawn with

    weight = 1 / (1 + queue)        u = FNV-1a-32(request id) / 2^32

so that a repeated decision about a request draws the same peer. An unknown queue counts as one more
than the longest known, or as the mean of the others where the page only lacks the queue. The peer's
`ip:port` goes into the request header `x-kv-cache-source-host-port`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picker.framework.attributes import Attributes, DataKey
from picker.framework.registry import Parameters, PluginType, PositiveInt, Stability
from picker.plugins._shared.load_signals import with_neutral
from picker.plugins._shared.stages import first_picked
from picker.prefix.match import match_info_key
from picker.types import Candidates, InferenceRequest, SchedulingResult

HEADER = "x-kv-cache-source-host-port"
TIER = "cpu"
_FNV_OFFSET, _FNV_PRIME, _MASK = 0x811C_9DC5, 0x0100_0193, 2**32 - 1


class P2pSourceParameters(Parameters, frozen=True):
    min_cached_token_delta: PositiveInt = 1
    prefill_profile_name: str = "prefill"
    prefix_match_info_producer_name: str = "precise-prefix-cache-producer"


@dataclass(frozen=True, slots=True)
class _Peer:
    """A candidate with prompt tokens in its CPU tier; `queue` is None if unknown."""

    key: str
    host_port: str
    tokens: int
    queue: float | None


@dataclass(frozen=True, slots=True)
class _Peers:
    peers: tuple[_Peer, ...]
    block_size_tokens: int


class P2pSourceProducer:
    def __init__(self, name: str, parameters: P2pSourceParameters) -> None:
        self._parameters = parameters
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._peers_key: DataKey[_Peers] = DataKey("P2pSources", name)
        self.consumes = (self._match_key,)
        self.produces = self.may_consume = (self._peers_key,)

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        info = attributes.get(self._match_key)
        if info is None or not info.tier_blocks:
            return request
        queues = with_neutral(
            [one.metrics.waiting_requests if one.metrics else None for one in candidates],
            [one.metrics is None for one in candidates],
        )
        peers = []
        for candidate, queue in zip(candidates, queues, strict=True):
            blocks = info.tier_blocks.get(candidate.key, {}).get(TIER, 0)
            if blocks:
                host_port = candidate.endpoint.host_port
                tokens = blocks * info.block_size_tokens
                peers.append(_Peer(candidate.key, host_port, tokens, queue))
        attributes[self._peers_key] = _Peers(tuple(peers), info.block_size_tokens)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """Return the header if a peer has enough more cached tokens than the computing endpoint."""
        known = attributes.get(self._peers_key)
        found = first_picked(result.profiles, self._parameters.prefill_profile_name)
        found = found or first_picked(result.profiles, result.primary_profile)
        if known is None or found is None:
            return None
        computing = found.key
        own = next((one.tokens for one in known.peers if one.key == computing), 0)
        least = own + self._parameters.min_cached_token_delta
        better = [one for one in known.peers if one.key != computing and one.tokens >= least]
        if not better:
            return None
        best = max(one.tokens for one in better) - known.block_size_tokens
        chosen = _drawn([one for one in better if one.tokens >= best], request.request_id)
        return {HEADER: chosen.host_port}


def _drawn(peers: Sequence[_Peer], request_id: str) -> _Peer:
    """Draw a peer by weight; the same request always draws the same peer."""
    in_order = sorted(peers, key=lambda peer: peer.key)
    longest = max((peer.queue for peer in peers if peer.queue is not None), default=0)
    weights = [1.0 / (1 + (longest + 1 if peer.queue is None else peer.queue)) for peer in in_order]
    left = _fnv(request_id.encode(errors="surrogatepass")) / 2**32 * sum(weights)
    for peer, weight in zip(in_order, weights, strict=True):
        left -= weight
        if left < 0:
            return peer
    return in_order[-1]


def _fnv(data: bytes) -> int:
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return value


PLUGINS = (PluginType("p2p-source-producer", P2pSourceProducer, Stability.ALPHA),)
