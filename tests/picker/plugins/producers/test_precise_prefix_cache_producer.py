"""precise-prefix-cache-producer: matches by events of engines, and refused parameters."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest

from picker.framework.attributes import Attributes
from picker.framework.interfaces import KvEventConsumer, KvEventFeed, KvEventSource
from picker.plugins.producers.precise_prefix_cache_producer import PrecisePrefixCacheProducer
from picker.prefix.kv_event_codec import BlocksStored, KvEventError, decode_events
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Endpoint, InferenceRequest, MultiModalFeature
from tests.support.picker.plugin_scenes import candidate, configured, decided, request_for

REAL_BATCH = Path(__file__).parents[3] / "data/vllm_0.32_kv_event.msgpack"
TOPIC = "kv@10.0.0.1:8000@m"


def producer(text: str = "{}") -> PrecisePrefixCacheProducer:
    return configured("precise-prefix-cache-producer", msgspec.json.decode(text), "p")


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


def stored(first: int, count: int, size: int = 16, **fields: Any) -> bytes:
    """Return a message of an engine that stored `count` blocks of the tokens 0, 1, 2 and so on."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + count)),
        "parent_block_hash": None,
        "token_ids": list(range(count * size)),
        "block_size": size,
        **fields,
    }
    return msgspec.msgpack.encode([1.0, [event], 0])


def find(
    plugin: PrecisePrefixCacheProducer, request: InferenceRequest
) -> PrefixCacheMatchInfo | None:
    attributes = Attributes()
    plugin.produce(request, [], attributes)
    return attributes.get(match_info_key("p"))


def matched(
    plugin: PrecisePrefixCacheProducer, ids: Iterable[int], **fields: Any
) -> Mapping[str, int]:
    info = find(plugin, request_for(prompts=(tokens(*ids),), **fields))
    return info.match_blocks


def send(plugin: PrecisePrefixCacheProducer, request: InferenceRequest, **picked: str) -> None:
    attributes = Attributes()
    plugin.produce(request, [], attributes)
    result = decided(**{name: [candidate(one)] for name, one in picked.items()})
    plugin.pre_request(request, result, attributes)


def test_a_prompt_matches_the_blocks_that_engines_report() -> None:
    plugin = producer()
    plugin.kv_events("default/a", TOPIC, stored(1, 2))
    plugin.kv_events("default/b", TOPIC, stored(1, 1))
    info = find(plugin, request_for(prompts=(tokens(*range(40)),)))
    assert info == PrefixCacheMatchInfo(
        2, 16, {"default/a": 2, "default/b": 1}, {"default/a": {"gpu": 2}, "default/b": {"gpu": 1}}
    )
    assert plugin.index_size == 2
    plugin.check_integrity()


@pytest.mark.parametrize(("size", "blocks"), [(128, 3), (16, 24), (256, 1)])
def test_the_events_of_a_real_engine_are_matched(size: int, blocks: int) -> None:
    """vLLM 0.32 published these 384 tokens, in blocks of 128."""
    payload = REAL_BATCH.read_bytes()
    ((event,), _) = decode_events(payload)
    assert isinstance(event, BlocksStored)
    plugin = producer(f'{{"tokenProcessorConfig": {{"blockSizeTokens": {size}}}}}')
    plugin.kv_events("default/a", TOPIC, payload)
    info = find(plugin, request_for(prompts=(event.tokens + tokens(*range(size)),)))
    assert info.match_blocks == {"default/a": blocks}
    assert info.tier_blocks == {"default/a": {"gpu": blocks}}
    plugin.check_integrity()


def test_unusable_events_of_a_batch_are_skipped() -> None:
    ids, plugin = list(range(512)), producer('{"tokenProcessorConfig": {"blockSizeTokens": 128}}')
    full = {"type": "BlockStored", "block_size": 256, "group_idx": 0}
    full["kv_cache_spec_kind"] = "mla_attention"
    sparse = full | {"block_size": 64, "group_idx": 1, "kv_cache_spec_kind": "sliding_window_mla"}
    events = [
        full | {"block_hashes": [1], "parent_block_hash": None, "token_ids": ids[:256]},
        sparse | {"block_hashes": [9], "parent_block_hash": None, "token_ids": ids[:256]},
        {"type": "BlocksDemoted", "block_hashes": [1]},
        full | {"block_hashes": [2], "parent_block_hash": 1, "token_ids": ids[256:]},
    ]
    payload = msgspec.msgpack.encode([1.0, events, 0])
    skipped = plugin.kv_events("default/a", TOPIC, payload)
    assert [one.reason for one in skipped] == ["not_resumable", "unknown_type"]
    assert matched(plugin, ids) == {"default/a": 4}
    plugin.check_integrity()


def test_no_weight_makes_a_match_longer_than_the_prompt() -> None:
    plugin = producer(
        '{"indexerConfig": {"kvCacheBackendConfigs": [{"name": "gpu", "weight": 1e300}]}}'
    )
    plugin.kv_events("default/a", TOPIC, stored(1, 2))
    assert matched(plugin, range(48)) == {"default/a": 3}


def test_a_slower_tier_counts_less() -> None:
    prompt = request_for(prompts=(tokens(*range(48)),))
    plugin = producer()
    plugin.kv_events("default/a", TOPIC, stored(1, 3, medium="CPU"))
    plugin.kv_events("default/b", TOPIC, stored(1, 1, medium="CPU"))
    info = find(plugin, prompt)
    assert info.match_blocks == {"default/a": 2}
    assert info.tier_blocks == {"default/a": {"cpu": 3}, "default/b": {"cpu": 1}}
    weights = '{"indexerConfig": {"kvCacheBackendConfigs": [{"name": "CPU", "weight": 0.1}]}}'
    plugin = producer(weights)
    plugin.kv_events("default/a", TOPIC, stored(1, 3, medium="CPU"))
    assert find(plugin, prompt) == PrefixCacheMatchInfo(3, 16, {}, {"default/a": {"cpu": 3}})


def test_ten_blocks_of_the_slower_tier_are_eight() -> None:
    """The floating-point sum of ten times 0.8 is a little less than eight."""
    plugin = producer()
    plugin.kv_events("default/a", TOPIC, stored(1, 10, medium="CPU"))
    assert matched(plugin, range(160)) == {"default/a": 8}


def test_models_adapters_salts_and_media_do_not_share() -> None:
    plugin = producer()
    plugin.kv_events("default/base", TOPIC, stored(1, 1))
    plugin.kv_events("default/other", "kv@10.0.0.1:8000@other", stored(1, 1))
    plugin.kv_events("default/adapter", TOPIC, stored(1, 1, lora_name="ad"))
    plugin.kv_events("default/salted", TOPIC, stored(1, 1, extra_keys=[["salt"]]))
    plugin.kv_events("default/image", TOPIC, stored(1, 1, extra_keys=[["abc"]]))
    image = ((MultiModalFeature("image", "abc", 2, 5),),)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("base", {}),
        ("other", {"model": "other"}),
        ("adapter", {"model": "ad"}),
        ("salted", {"salt": "salt"}),
        ("image", {"features": image}),
    ]
    for expected, fields in asked:
        assert matched(plugin, range(16), **fields) == {f"default/{expected}": 1}


def test_several_prompts_add_up() -> None:
    plugin = producer()
    plugin.kv_events("default/a", TOPIC, stored(1, 2))
    prompts = (tokens(*range(32)), tokens(*range(16), *[9] * 16), tokens(1))
    info = find(plugin, request_for(prompts=prompts))
    assert info == PrefixCacheMatchInfo(4, 16, {"default/a": 3}, {"default/a": {"gpu": 3}})


def test_without_prompts_nothing_is_found() -> None:
    plugin = producer('{"speculativeIndexing": true}')
    assert find(plugin, request_for()) is None
    send(plugin, request_for(), default="a")
    assert matched(plugin, range(16)) == {}


@pytest.mark.parametrize("forget", ["endpoint_removed", "kv_events_lost"])
def test_an_endpoint_that_left_or_lost_its_cache_is_forgotten(forget: str) -> None:
    plugin = producer()
    for key in ("default/a", "default/b"):
        plugin.kv_events(key, TOPIC, stored(1, 1))
    getattr(plugin, forget)("default/a")
    assert matched(plugin, range(16)) == {"default/b": 1}


def test_an_invalid_message_is_refused() -> None:
    plugin = producer()
    event = ["BlockStored", [1], None, list(range(16)), 16]
    with pytest.raises(KvEventError):
        plugin.kv_events("default/a", TOPIC, msgspec.msgpack.encode({"events": [event]}))
    assert plugin.index_size == 0


def test_speculation_expects_sent_prompts_for_a_while() -> None:
    plugin = producer('{"speculativeIndexing": true}')
    prompts = (tokens(*range(16)),)
    send(plugin, request_for(prompts=prompts, received_at_seconds=10.0), decode="a", prefill="b")
    for now, expected in ((11.9, {"default/a": 1, "default/b": 1}), (12.0, {})):
        assert matched(plugin, range(16), received_at_seconds=now) == expected


def test_without_speculation_only_events_count() -> None:
    plugin = producer()
    send(plugin, request_for(prompts=(tokens(*range(16)),)), default="a")
    assert matched(plugin, range(16)) == {}


@pytest.mark.parametrize("name", ["", "cbor-fnv", "xxh64"])
@pytest.mark.parametrize("size", ['"blockSizeTokens": 64', '"blockSize": 64'])
def test_the_hash_algorithm_and_the_block_size_are_configurable(name: str, size: str) -> None:
    text = f'{{"tokenProcessorConfig": {{{size}, "hashSeed": "s", "hashAlgorithm": "{name}"}}}}'
    plugin = producer(text)
    plugin.kv_events("default/a", TOPIC, stored(1, 8))
    info = find(plugin, request_for(prompts=(tokens(*range(130)),)))
    assert (info.total_blocks, info.block_size_tokens) == (2, 64)
    assert info.match_blocks == {"default/a": 2}


def test_events_come_from_the_configured_ports() -> None:
    plugin = producer()
    assert isinstance(plugin, KvEventConsumer)
    assert plugin.kv_event_feed == KvEventFeed(None, "kv@")
    plain = Endpoint("a", "10.0.0.1", 8000)
    assert plugin.kv_event_source(plain) == KvEventSource("tcp://10.0.0.1:5557")
    assert plugin.describe(plain) == {}
    text = (
        '{"kvEventsConfig": {"topicFilter": "", "podDiscoveryConfig": '
        '{"socketPort": 6000, "replaySocketPort": 7000}}}'
    )
    plugin = producer(text)
    assert plugin.kv_event_feed.topic_prefix == ""
    second = Endpoint("b", "fd00::1", 8001, rank_index=1)
    assert plugin.kv_event_source(second) == KvEventSource(
        "tcp://[fd00::1]:6001", "tcp://[fd00::1]:7001"
    )
    labels = {"kv-events-port": "9001", "kv-events-replay-port": "9002"}
    own = Endpoint("c", "127.0.0.1", 8002, labels=labels, rank_index=1)
    assert plugin.kv_event_source(own) == KvEventSource(
        "tcp://127.0.0.1:9001", "tcp://127.0.0.1:9002"
    )


def test_an_invalid_port_label_is_ignored() -> None:
    plugin = producer()
    for text in ("0", "65536", "-1", "x", "", "1" * 5000):
        endpoint = Endpoint("a", "10.0.0.1", 8000, labels={"kv-events-port": text})
        assert plugin.kv_event_source(endpoint) == KvEventSource("tcp://10.0.0.1:5557")


def test_engines_may_connect_instead() -> None:
    plugin = producer('{"kvEventsConfig": {"discoverPods": false, "zmqEndpoint": "tcp://*:5557"}}')
    assert plugin.kv_event_feed == KvEventFeed("tcp://*:5557", "kv@")


@pytest.mark.parametrize(
    ("discovery", "expected"),
    [
        ("{}", ["a", "b", "c"]),
        ('{"podLabelSelector": "app=llm"}', ["b", "c"]),
        ('{"podLabelSelector": "app=llm", "podNamespace": "prod"}', ["c"]),
    ],
)
def test_a_selector_and_a_namespace_narrow_the_pool(discovery: str, expected: list[str]) -> None:
    plugin = producer(f'{{"kvEventsConfig": {{"podDiscoveryConfig": {discovery}}}}}')
    endpoints = [
        Endpoint("a", "10.0.0.1", 8000),
        Endpoint("b", "10.0.0.2", 8000, labels={"app": "llm"}),
        Endpoint("c", "10.0.0.3", 8000, namespace="prod", labels={"app": "llm"}),
    ]
    assert [one.name for one in endpoints if plugin.kv_event_source(one)] == expected
