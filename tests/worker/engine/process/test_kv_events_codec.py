"""KV events on the wire: vLLM's bytes in map form, the older arrays, both kinds of hashes."""

import msgspec
import pytest

from worker.engine.cache.block_hash import BlockHash, BlockHasher
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, announcement
from worker.engine.process.kv_events import EventEncoder
from worker.types import Adapter

ONE = BlockHash((1).to_bytes(32, "big"), b"root", (1, 2))
TWO = BlockHash((2).to_bytes(32, "big"), ONE.digest, (3, 4))
SALTED = BlockHash(b"\xff" * 32, b"root", (1, 2), (("cache_salt", "s"),))
EVENTS = [BlocksStored((ONE, TWO), None), BlockRemoved(ONE.digest), CacheCleared()]

# vLLM 0.32's own bytes for these events at 1.5 s, rank 0.
CHECK_BYTES = bytes.fromhex(
    "93cb3ff8000000000000"
    "93"
    "88a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469"
    "756da3475055a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da3475055"
    "81a474797065b0416c6c426c6f636b73436c6561726564"
    "00"
)


def test_the_map_form_is_vllms_byte_for_byte() -> None:
    assert EventEncoder(2).encode(EVENTS, 1.5) == CHECK_BYTES


def test_the_array_form_is_positional() -> None:
    payload = EventEncoder(2, form="array").encode(EVENTS, 1.5)
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None],
            ["BlockRemoved", [1], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


@pytest.mark.parametrize("form", ["map", "array"])
def test_extra_keys_are_untagged_and_only_sent_when_there_are_some(form: str) -> None:
    child = BlockHash(b"\xfe" * 32, SALTED.digest, (3, 4))
    payload = EventEncoder(2, form).encode([BlocksStored((SALTED, child), None)], 0.0)
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert (event["extra_keys"] if form == "map" else event[8]) == [["s"], None]


def test_blocks_of_an_adapter_name_it() -> None:
    adapter = Adapter("sql", "/adapters/sql", 5)
    chain: list[BlockHash] = []
    BlockHasher(2).extend(chain, [1, 2, 3, 4], 2, "s", adapter)
    payload = EventEncoder(2).encode([BlocksStored(tuple(chain), None)], 0.0)
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert (event["lora_name"], event["lora_id"]) == ("sql", 5)
    assert event["extra_keys"] == [["sql", "s"], ["sql"]]


def test_hashes_can_be_whole_digests() -> None:
    """Then parents are bytes too, and integers are the last 64 bits, unsigned."""
    stored = BlocksStored((SALTED,), TWO.digest)
    (whole,) = msgspec.msgpack.decode(EventEncoder(2, int_hashes=False).encode([stored], 0.0))[1]
    assert (whole["block_hashes"], whole["parent_block_hash"]) == ([SALTED.digest], TWO.digest)
    (short,) = msgspec.msgpack.decode(EventEncoder(2).encode([stored], 0.0))[1]
    assert (short["block_hashes"], short["parent_block_hash"]) == ([2**64 - 1], 2)


def test_an_announcement_reports_everything_in_runs() -> None:
    other = BlockHash(b"o" * 32, b"root", (5, 6))
    orphan = BlockHash(b"p" * 32, b"gone", (7, 8))
    blocks = [(ONE, True), (TWO, False), (other, True), (other, True), (orphan, False)]
    assert announcement(blocks) == [
        CacheCleared(),
        BlocksStored((ONE, TWO), None),
        BlocksStored((other,), None),
        BlocksStored((other,), None),
        BlocksStored((orphan,), b"gone"),
    ]
    assert announcement([]) == [CacheCleared()]
