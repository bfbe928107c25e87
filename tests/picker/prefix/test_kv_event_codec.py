"""The codec decodes the events of engines and skips unusable ones."""

from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.prefix.kv_event_codec import (
    MAX_EXTRA_KEYS,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineType,
    KvEvent,
    KvEventError,
    Topic,
    decode_events,
    parse_topic,
    split_message,
)
from tests.depth import examples

# vLLM 0.32's own bytes at 1.5 s, rank 0: two blocks of two tokens stored, one removed, cleared.
VLLM_BYTES = bytes.fromhex(
    "93cb3ff8000000000000"
    "93"
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469"
    "756da3475055a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055"
    "81a474797065b0416c6c426c6f636b73436c6561726564"
    "00"
)


def tokens(*ids: int) -> bytes:
    return pack(f"<{len(ids)}I", *ids)


REAL_BATCH = Path(__file__).parents[2] / "data/vllm_0.32_kv_event.msgpack"


def message(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        **fields,
    }


def events_of(payload: bytes, engine: EngineType = EngineType.VLLM) -> list[KvEvent]:
    events, skipped = decode_events(payload, engine)
    assert skipped == []
    return events


def test_vllms_own_bytes_decode_to_one_event_of_each_kind() -> None:
    assert events_of(VLLM_BYTES) == [
        BlocksStored((1, 2), None, tokens(1, 2, 3, 4), 2, "gpu"),
        BlocksRemoved((1,), "gpu"),
        CacheCleared(),
    ]


def test_a_recorded_message_of_vllm_decodes() -> None:
    """vLLM 0.32 published it after it computed three blocks of a prompt."""
    (event,) = events_of(REAL_BATCH.read_bytes())
    assert isinstance(event, BlocksStored)
    assert event.hashes == (320565843606564259, 1498742607291641018, 3648846642293913320)
    assert event.parent is None
    assert (event.block_size, len(event.tokens)) == (128, 4 * 3 * 128)
    assert event.tokens[:16] == tokens(504, 2365, 6354, 16438)
    assert (event.tier, event.adapter, event.group) == ("gpu", "", 0)
    assert event.extras == ((), (), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": -1},
        {"block_size": 10**9},
        {"block_size": 2**63},
        {"block_size": 2.0},
        {"block_size": None},
        {"block_hashes": [1, 2]},
        {"block_hashes": []},
        {"token_ids": [1, 2, 3]},
        {"token_ids": list(range(10**6))},
        {"token_ids": [1, 2.0]},
        {"token_ids": b"12345678"},
        {"extra_keys": [[f"{number}" for number in range(MAX_EXTRA_KEYS + 1)]]},
    ],
)
def test_an_event_with_inconsistent_sizes_is_skipped(fields: dict[str, Any]) -> None:
    events, skipped = decode_events(message(stored(**fields)))
    assert events == []
    assert [one.reason for one in skipped] == ["unusable"]


def test_a_block_may_have_extra_keys_up_to_the_limit() -> None:
    texts = tuple(f"{number}" for number in range(MAX_EXTRA_KEYS))
    (event,) = events_of(message(stored(extra_keys=[[*texts], None])))
    assert isinstance(event, BlocksStored)
    assert event.extras == (texts, ())


def test_a_message_of_a_million_tokens_decodes() -> None:
    count = 10**6
    ids = list(range(count))
    in_small = stored(block_hashes=list(range(1, count // 16 + 1)), token_ids=ids, block_size=16)
    in_one = stored(token_ids=ids, block_size=count)
    small, one = events_of(message(in_small, in_one))
    assert isinstance(small, BlocksStored)
    assert isinstance(one, BlocksStored)
    assert len(small.hashes) == count // 16
    assert small.tokens == one.tokens


@pytest.mark.parametrize("engine", list(EngineType))
def test_arrays_may_omit_trailing_fields(engine: EngineType) -> None:
    """Older vLLM and SGLang send arrays; unknown fields are ignored."""
    payload = message(
        ["BlockStored", [1], 7, [1, 2], 2],
        ["BlockStored", [2], 1, [3, 4], 2, 5, "CPU", "ad", [["x"]], 1, "mla_attention", 9, "new"],
        ["BlockRemoved", [1]],
        ["BlockRemoved", [2], "CPU", 1],
        ["AllBlocksCleared"],
    )
    assert events_of(payload, engine) == [
        BlocksStored((1,), 7, tokens(1, 2), 2),
        BlocksStored((2,), 1, tokens(3, 4), 2, "cpu", "ad", (("x",),), 1),
        BlocksRemoved((1,)),
        BlocksRemoved((2,), "cpu", 1),
        CacheCleared(),
    ]


def test_only_the_last_eight_bytes_of_a_hash_count() -> None:
    digest = b"\x11" * 24 + b"\x00" * 7 + b"\x09"
    event = stored(
        block_hashes=[digest, -1, b"\x05"], parent_block_hash=0, token_ids=[1, 2, 3], block_size=1
    )
    (read,) = events_of(message(event))
    assert isinstance(read, BlocksStored)
    assert read.hashes == (9, 2**64 - 1, 5)
    assert read.parent is None


def test_extra_keys_are_texts_without_the_adapter() -> None:
    extra_keys = [["ad", "image", ["audio", 3]], None]
    event = stored(
        block_hashes=[1, 2], token_ids=[1, 2, 3, 4], lora_name="ad", extra_keys=extra_keys
    )
    (read,) = events_of(message(event))
    assert isinstance(read, BlocksStored)
    assert read.extras == (("image", "audio"), ())
    assert read.adapter == "ad"


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (None, 1),
        ("full_attention", 1),
        ("mla_attention", 1),
        ("sliding_window", 0),
        ("sliding_window_mla", 0),
        ("mamba", 0),
    ],
)
def test_only_blocks_of_caches_with_all_tokens_count(kind: str | None, count: int) -> None:
    """A prompt cannot resume from a sliding window or a state space."""
    events, skipped = decode_events(message(stored(kv_cache_spec_kind=kind)))
    assert len(events) == count
    assert [one.reason for one in skipped] == ["not_resumable"] * (1 - count)


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_skipped_sparse_group_leaves_the_full_group_of_its_batch(sparse_first: bool) -> None:
    ids = list(range(512))
    full = stored(token_ids=ids, block_size=512, group_idx=0, kv_cache_spec_kind="mla_attention")
    sparse = stored(
        block_hashes=[9], token_ids=ids, block_size=128, group_idx=1,
        kv_cache_spec_kind="sliding_window_mla",
    )  # fmt: skip
    batch = [sparse, full] if sparse_first else [full, sparse]
    events, skipped = decode_events(message(*batch))
    assert events == [BlocksStored((1,), None, tokens(*ids), 512, group=0)]
    assert [one.reason for one in skipped] == ["not_resumable"]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "Unheard"},
        {"block_hashes": [1]},
        ["BlockStored", [1], None, [1, 2]],
        ["BlockRemoved"],
        [],
        7,
        stored(block_hashes=7),
        stored(block_hashes=["1"]),
        stored(token_ids=[1, -2]),
        stored(token_ids=[1, 2**32]),
        stored(token_ids=["a", "b"]),
        stored(token_ids=[1]),
        stored(token_ids=None),
        stored(block_size=0),
        stored(block_size=True),
        stored(medium=5),
        stored(lora_name=5),
        stored(extra_keys=5),
        stored(extra_keys=[5]),
        stored(extra_keys=[[5]]),
        stored(group_idx="a"),
    ],
)
def test_an_unusable_event_is_skipped_and_the_others_count(event: Any) -> None:
    events, skipped = decode_events(message(["BlockRemoved", [1]], event, ["BlockRemoved", [2]]))
    assert events == [BlocksRemoved((1,)), BlocksRemoved((2,))]
    (one,) = skipped
    assert one.reason == ("unknown_type" if "type 'Unheard'" in one.text else "unusable")


@pytest.mark.parametrize("part_bytes", [1, 100, 5000, 10**6])
def test_the_parts_of_a_message_contain_its_events(part_bytes: int) -> None:
    ids = iter(range(1, 10**6))
    events = [stored(block_hashes=[next(ids)], token_ids=[next(ids), 7]) for _ in range(200)]
    whole = message(*events, ["BlockRemoved", [5]], ["AllBlocksCleared"])
    parts = list(split_message(whole, part_bytes))
    assert [one for part in parts for one in events_of(part)] == events_of(whole)
    largest = max(len(msgspec.msgpack.encode(one)) for one in events)
    assert max(map(len, parts)) < part_bytes + 2 * largest
    assert len(parts) <= len(whole) // part_bytes + 1


@pytest.mark.parametrize("junk", [b"\xff" * 50, msgspec.msgpack.encode(list(range(50)))])
def test_malformed_bytes_are_not_split(junk: bytes) -> None:
    assert list(split_message(junk, 10)) == [junk]


def test_an_event_that_is_not_msgpack_is_skipped_alone() -> None:
    name = stored(lora_name="\u00e9\u00e9")
    payload = message(["AllBlocksCleared"], name, ["BlockRemoved", [7]])
    events, skipped = decode_events(payload.replace("\u00e9\u00e9".encode(), b"\xff" * 4))
    assert events == [CacheCleared(), BlocksRemoved((7,))]
    assert len(skipped) == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1.0, 2])]
)
def test_a_malformed_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(KvEventError):
        decode_events(payload)


def test_maps_from_sglang_are_skipped() -> None:
    events, skipped = decode_events(VLLM_BYTES, EngineType.SGLANG)
    assert events == []
    assert len(skipped) == 3
    assert "neither an array nor a map" in skipped[0].text


def test_a_topic_names_pod_and_model() -> None:
    """Model names may contain the separator; any other topic is a pod name."""
    assert parse_topic("kv@10.0.0.1:8000@org/model@v2") == Topic("10.0.0.1:8000", "org/model@v2")
    assert parse_topic("10.0.0.1:8000") == Topic("10.0.0.1:8000")
    assert parse_topic("") == Topic("")


@examples(200)
@given(st.binary(max_size=60), st.integers(0, len(VLLM_BYTES)))
def test_arbitrary_bytes_raise_only_codec_errors(noise: bytes, at: int) -> None:
    for payload in (noise, VLLM_BYTES[:at] + noise, VLLM_BYTES[:at] + noise + VLLM_BYTES[at:]):
        try:
            decode_events(payload)
        except KvEventError:
            continue
