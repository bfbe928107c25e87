"""precise-prefix-cache-producer: the part of the prompt that engines report as cached.

Engines publish each block that enters or leaves their KV cache (vLLM's and SGLang's KV events). For
each endpoint

    score = Σ weight of the best tier of each block, from block 0 to the first one it does not hold
    match = ⌊score⌋ blocks, no more than the prompt has

with weights from `kvCacheBackendConfigs` (gpu 1.0, cpu 0.8; an unnamed tier 1.0). Several prompts
add up. Only full blocks of `tokenProcessorConfig.blockSizeTokens` count, which should be the
engines' own size; larger blocks of an engine, such as chunks in host memory, count only as a whole.
The prompt must be tokenized as the engines do it: estimated tokens match nothing.

With `speculativeIndexing` the endpoint that a request was sent to counts as holding its prompt for
`speculativeTTL`, until its engine reports the blocks itself.

Events come over ZMQ: with `discoverPods` from every endpoint, at `socketPort` + rank or at the
ports in its labels `kv-events-port` and `kv-events-replay-port`; else at `zmqEndpoint`, to which
engines connect, and name themselves in the topic (`kv@ip:port@model`).

The index is in memory, with at most `inMemoryConfig.size` distinct blocks. An index in Redis and
one limited by cost are refused: each replica of the picker subscribes to all engines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from base.durations import parse_duration
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import KvEventFeed, KvEventSource, SkippedKvEvent
from picker.framework.label_selector import LabelSelector
from picker.framework.registry import (
    NonNegativeFloat,
    NonNegativeInt,
    Parameters,
    PluginType,
    Port,
    PortOrZero,
    PositiveInt,
)
from picker.plugins._shared.stages import prompt_readers
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.block_keys import BlockKeys, HashAlgorithm
from picker.prefix.kv_event_codec import EngineType, decode_events, parse_topic
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.prefix.precise_index import PreciseIndex, PreciseMatch
from picker.types import Candidates, Endpoint, InferenceRequest, SchedulingResult

DEFAULT_BLOCK_SIZE_TOKENS = 16
DEFAULT_TIER_WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
DEFAULT_SELECTOR = "llm-d.ai/inference-serving=true"
PORT_LABEL = "kv-events-port"
REPLAY_PORT_LABEL = "kv-events-replay-port"
_ROUNDING = 1e-6  # a sum of weights is inexact


class TokenProcessorParameters(Parameters, frozen=True):
    """`tokenProcessorConfig`: the blocks of prompts, and the hashing of their keys."""

    block_size_tokens: PositiveInt = DEFAULT_BLOCK_SIZE_TOKENS
    block_size: NonNegativeInt = 0  # deprecated; counts while the other has its default
    hash_seed: str = ""
    hash_algorithm: str = ""  # "" is the faster one: keys never leave the picker

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.block_size:
            return
        if self.block_size_tokens == DEFAULT_BLOCK_SIZE_TOKENS:
            msgspec.structs.force_setattr(self, "block_size_tokens", self.block_size)
        else:
            msgspec.structs.force_setattr(self, "block_size", self.block_size_tokens)


class InMemoryParameters(Parameters, frozen=True):
    size: PositiveInt = 10**8
    pod_cache_size: int = 10


class BlockIndexParameters(Parameters, frozen=True):
    in_memory_config: InMemoryParameters = InMemoryParameters()
    redis_config: dict[str, Any] | None = None
    valkey_config: dict[str, Any] | None = None
    cost_aware_memory_config: dict[str, Any] | None = None
    enable_metrics: bool = False
    metrics_logging_interval: str | int = 0


class TierParameters(Parameters, frozen=True):
    name: str
    weight: NonNegativeFloat


class IndexerParameters(Parameters, frozen=True):
    kv_block_index_config: BlockIndexParameters = BlockIndexParameters()
    kv_cache_backend_configs: tuple[TierParameters, ...] = ()
    tokenizers_pool_config: dict[str, Any] | None = None


class PodDiscoveryParameters(Parameters, frozen=True):
    """Narrows the pool's endpoints by a namespace, and by a selector other than the default."""

    pod_label_selector: str = DEFAULT_SELECTOR
    pod_namespace: str = ""
    socket_port: Port = 5557
    replay_socket_port: PortOrZero = 0


class KvEventsParameters(Parameters, frozen=True):
    zmq_endpoint: str = ""
    topic_filter: str = "kv@"
    concurrency: int = 4
    engine_type: EngineType = EngineType.VLLM
    discover_pods: bool = True
    pod_discovery_config: PodDiscoveryParameters = PodDiscoveryParameters()


class PrecisePrefixCacheParameters(Parameters, frozen=True):
    token_processor_config: TokenProcessorParameters = TokenProcessorParameters()
    indexer_config: IndexerParameters = IndexerParameters()
    kv_events_config: KvEventsParameters = KvEventsParameters()
    speculative_indexing: bool = False
    speculative_ttl: str = msgspec.field(default="2s", name="speculativeTTL")

    @property
    def without_effect(self) -> Mapping[str, str]:
        index, events = "indexerConfig.kvBlockIndexConfig", "kvEventsConfig"
        found = {
            f"{index}.inMemoryConfig.podCacheSize": "every endpoint that holds a block is listed",
            f"{index}.metricsLoggingInterval": "metrics of the index are not logged",
            f"{events}.concurrency": "messages are taken in one by one",
        }
        if not self.indexer_config.kv_block_index_config.enable_metrics:
            found[f"{index}.enableMetrics"] = "metrics of the index are always there"
        if self.kv_events_config.discover_pods:
            found[f"{events}.zmqEndpoint"] = "discoverPods is on, so each endpoint is subscribed to"
        return found


class PrecisePrefixCacheProducer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, name: str, parameters: PrecisePrefixCacheParameters) -> None:
        self._maker = _maker(parameters.token_processor_config)
        weights = _tier_weights(parameters.indexer_config)
        size = parameters.indexer_config.kv_block_index_config.in_memory_config.size
        self._index = PreciseIndex(self._maker, weights, size)
        events = parameters.kv_events_config
        self._feed = _feed(events)
        self._engine = events.engine_type
        discovery = events.pod_discovery_config
        self._port, self._replay_port = discovery.socket_port, discovery.replay_socket_port
        self._namespace = discovery.pod_namespace
        text = discovery.pod_label_selector
        self._selector = LabelSelector.parse("" if text == DEFAULT_SELECTOR else text)
        self._ttl_seconds = parse_duration(parameters.speculative_ttl)
        self._is_speculative = parameters.speculative_indexing and self._ttl_seconds > 0
        self._match_key = match_info_key(name)
        self._keys_key: DataKey[tuple[tuple[int, ...], ...]] = DataKey("BlockKeys", name)
        self.produces = (self._match_key,)
        self.kv_event_feed = self._feed

    @property
    def index_size(self) -> int:
        return len(self._index)

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        if not request.prompts:
            return request
        prompts = tuple(
            tuple(self._keys(request, number)) for number in range(len(request.prompts))
        )
        attributes[self._keys_key] = prompts
        now = request.received_at_seconds
        found = [self._index.match(keys, now) for keys in prompts]
        info = _match_info(found, sum(map(len, prompts)), self._maker.block_size_tokens)
        attributes[self._match_key] = info
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Expect the prompt at the first endpoints of the primary profile and of `prefill`."""
        prompts = attributes.get(self._keys_key)
        if prompts is None or not self._is_speculative:
            return
        now = request.received_at_seconds
        for _, candidate in prompt_readers(result):
            for keys in prompts:
                self._index.expect(candidate.key, keys, now, self._ttl_seconds)

    def endpoint_removed(self, key: str) -> None:
        self._index.clear(key)

    def describe(self, endpoint: Endpoint) -> Mapping[str, Any]:
        """Return nothing; exists so that a configuration may list this plugin as an extractor."""
        return {}

    def kv_event_source(self, endpoint: Endpoint) -> KvEventSource | None:
        """Return the engine's addresses; None outside the configured namespace and labels."""
        if self._namespace and endpoint.namespace != self._namespace:
            return None
        if not self._selector.matches(endpoint.labels):
            return None
        rank = endpoint.rank_index
        port = _own_port(endpoint, PORT_LABEL) or self._port + rank
        replay = _own_port(endpoint, REPLAY_PORT_LABEL)
        if not replay and self._replay_port:
            replay = self._replay_port + rank
        return KvEventSource(
            _address(endpoint, port), _address(endpoint, replay) if replay else None
        )

    def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
        """Apply a message; return skipped events. Raises `KvEventError` before any is applied."""
        model = parse_topic(topic).model
        events, skipped = decode_events(payload, self._engine)
        for event in events:
            self._index.apply(key, model, event)
        return skipped

    def kv_events_lost(self, key: str) -> None:
        """Discard the endpoint's blocks, because its events have a gap."""
        self._index.clear(key)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the index contradicts itself."""
        self._index.check_integrity()

    def _keys(self, request: InferenceRequest, number: int) -> list[int]:
        features = request.features[number] if number < len(request.features) else ()
        salt = request.body.cache_salt
        return self._maker.prompt(request.target_model, request.prompts[number], features, salt)


def _match_info(
    found: Sequence[Mapping[str, PreciseMatch]], total: int, block_size_tokens: int
) -> PrefixCacheMatchInfo:
    scores: Counter[str] = Counter()
    tiers: dict[str, Counter[str]] = {}
    for matches in found:
        for key, match in matches.items():
            # Ten blocks of weight 0.8 must be eight, whatever the floating-point sum.
            scores[key] += int(match.score + _ROUNDING)
            tiers.setdefault(key, Counter()).update(match.tiers)
    matched = {key: min(score, total) for key, score in scores.items() if score}
    return PrefixCacheMatchInfo(total, block_size_tokens, matched, tiers)


def _maker(parameters: TokenProcessorParameters) -> BlockKeys:
    name = parameters.hash_algorithm or HashAlgorithm.XXH64.value
    allowed = [one.value for one in HashAlgorithm]
    if name not in allowed:
        text = f"tokenProcessorConfig.hashAlgorithm must be one of {', '.join(allowed)}"
        raise ValueError(f"{text}, got '{name}'")
    return BlockKeys(parameters.block_size_tokens, parameters.hash_seed, HashAlgorithm(name))


def _tier_weights(parameters: IndexerParameters) -> Mapping[str, float]:
    index = parameters.kv_block_index_config
    if index.cost_aware_memory_config is not None:
        raise ValueError("costAwareMemoryConfig is not supported: use inMemoryConfig.size")
    if index.redis_config is not None or index.valkey_config is not None:
        text = "is not supported: every replica of the picker hears all engines itself"
        raise ValueError(f"redisConfig or valkeyConfig {text}")
    if parameters.tokenizers_pool_config is not None:
        raise ValueError("tokenizersPoolConfig is gone: configure a token-producer")
    named = {tier.name.lower(): tier.weight for tier in parameters.kv_cache_backend_configs}
    return named or DEFAULT_TIER_WEIGHTS


def _feed(parameters: KvEventsParameters) -> KvEventFeed:
    if not parameters.discover_pods and not parameters.zmq_endpoint:
        raise ValueError("without discoverPods, kvEventsConfig needs a zmqEndpoint")
    return KvEventFeed(
        bind_address=None if parameters.discover_pods else parameters.zmq_endpoint,
        topic_prefix=parameters.topic_filter,
    )


def _own_port(endpoint: Endpoint, label: str) -> int | None:
    text = endpoint.labels.get(label, "")
    port = int(text) if text.isdecimal() and len(text) <= 5 else 0
    return port if 0 < port < 65536 else None


def _address(endpoint: Endpoint, port: int) -> str:
    host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    return f"tcp://{host}:{port}"


PLUGIN = PluginType("precise-prefix-cache-producer", PrecisePrefixCacheProducer)
