"""KV events: the bytes on the wire, and the publisher over real sockets."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest
import zmq

from worker.config import KvEventsConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher
from worker.engine.cache.cache_events import (
    BlockRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    announcement,
)
from worker.engine.process.kv_events import EventEncoder, KvEventPublisher, publishes
from worker.errors import ConfigError
from worker.types import Adapter

LOOPBACK = "tcp://127.0.0.1:*"
END = b"\xff" * 8
BLOCK = BlockHash((7).to_bytes(32, "big"), b"root", (1, 2))
STORED: list[CacheEvent] = [BlocksStored((BLOCK,), None)]


def no_announcement() -> list[CacheEvent]:
    return [CacheCleared()]


@contextmanager
def publisher(
    announce: Callable[[], list[CacheEvent]] = no_announcement, **settings: Any
) -> Iterator[KvEventPublisher]:
    given = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **settings}
    config = KvEventsConfig(enable_kv_cache_events=True, **given)
    ticks = itertools.count()
    events = KvEventPublisher(config, 2, announce, lambda: float(next(ticks)))
    try:
        yield events
    finally:
        events.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def receive(socket: zmq.Socket[Any]) -> list[bytes]:
    assert socket.poll(120_000), "no message"
    frames: list[bytes] = socket.recv_multipart()
    return frames


def dealer(context: zmq.Context[Any], events: KvEventPublisher) -> zmq.Socket[Any]:
    socket = context.socket(zmq.DEALER)
    socket.connect(events.replay_endpoint)
    return socket


def ask(socket: zmq.Socket[Any], start: int) -> list[tuple[int, list[Any]]]:
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, number, payload = receive(socket)
        assert empty == b""
        if number == END:
            assert (topic, payload) == (b"", b"")
            return batches
        assert topic == b"kv@me@model"
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        batches.append((int.from_bytes(number, "big"), [event["type"] for event in events]))


def ask_until(socket: zmq.Socket[Any], last: int) -> list[tuple[int, list[Any]]]:
    while True:
        batches = ask(socket, 0)
        if batches and batches[-1][0] >= last:
            return batches


def test_a_subscriber_that_binds_gets_topic_number_and_payload(context: zmq.Context[Any]) -> None:
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"kv@")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    with publisher(endpoint=f"tcp://127.0.0.1:{port}", topic="kv@me@model") as events:
        # A subscription travels to the publisher; what is sent before it arrives is lost.
        number = -1
        while not subscriber.poll(20):
            events.publish(STORED)
        topic, frame, payload = receive(subscriber)
        first = int.from_bytes(frame, "big")
        assert (topic, len(frame)) == (b"kv@me@model", 8)
        assert 0 <= first <= events.last_sequence
        seconds, reported, rank = msgspec.msgpack.decode(payload)
        assert (seconds, rank) == (float(first), 0)
        assert reported[0]["type"] == ("BlockStored" if first else "AllBlocksCleared")
        number = first
        events.publish([BlockRemoved(BLOCK.digest)])
        while number < events.last_sequence:
            _, frame, payload = receive(subscriber)
            number += 1
            assert int.from_bytes(frame, "big") == number
        assert msgspec.msgpack.decode(payload)[1][0]["block_hashes"] == [7]


def test_a_subscriber_can_dial_a_publisher_that_binds(context: zmq.Context[Any]) -> None:
    with publisher(topic="kv@me@model") as events:
        assert events.endpoint.startswith("tcp://127.0.0.1:")
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(events.endpoint)
        while not subscriber.poll(20):
            events.publish(STORED)
        assert len(receive(subscriber)) == 3


def test_replay_sends_what_is_buffered_from_a_number_on(context: zmq.Context[Any]) -> None:
    with publisher(topic="kv@me@model") as events:
        for _ in range(4):
            events.publish(STORED)
        client = dealer(context, events)
        assert ask_until(client, 4) == [
            (0, ["AllBlocksCleared"]),
            *((number, ["BlockStored"]) for number in range(1, 5)),
        ]
        assert [number for number, _ in ask(client, 3)] == [3, 4]
        assert ask(client, 99) == []
        assert events.last_sequence == 4


def test_the_replay_buffer_is_bounded(context: zmq.Context[Any]) -> None:
    with publisher(topic="kv@me@model", buffer_steps=3) as events:
        for _ in range(10):
            events.publish(STORED)
        batches = ask_until(dealer(context, events), 10)
        assert [number for number, _ in batches] == [8, 9, 10]


def test_malformed_replay_requests_are_ignored(context: zmq.Context[Any]) -> None:
    with publisher(topic="kv@me@model") as events:
        client = dealer(context, events)
        for frames in ([b"x"], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
            client.send_multipart(frames)
        assert ask_until(client, 0) == [(0, ["AllBlocksCleared"])]


def test_a_full_queue_never_blocks_and_ends_in_an_announcement(context: zmq.Context[Any]) -> None:
    announced: list[int] = []

    def announce() -> list[CacheEvent]:
        announced.append(len(announced))
        return [CacheCleared(), *STORED]

    with publisher(announce, topic="kv@me@model", max_queue_size=2) as events:
        while not events.num_dropped:
            events.publish([BlockRemoved(BLOCK.digest)])
        assert announced  # once, unless the sender emptied a full queue just before it was dropped
        last = events.last_sequence
        assert events.num_dropped in (1, 2)  # the sender may have taken one meanwhile
        batches = dict(ask_until(dealer(context, events), last))
        assert batches[last] == ["AllBlocksCleared", "BlockStored"]
        assert len(batches) == last + 1 - events.num_dropped
        assert all(number in batches for number in range(last - events.num_dropped))


def test_an_endpoint_in_use_is_a_configuration_error(context: zmq.Context[Any]) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with (
        pytest.raises(ConfigError, match="--kv-events-config"),
        publisher(replay_endpoint=f"tcp://127.0.0.1:{port}"),
    ):
        pass


def test_closing_sends_what_is_queued_and_may_be_repeated(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.process.kv_events._CLOSE_SECONDS", 120.0)
    monkeypatch.setattr("worker.engine.process.kv_events._LINGER_MS", 120_000)
    with publisher(topic="t") as events:
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(events.endpoint)
        while not subscriber.poll(20):
            events.publish(STORED)
        events.publish(STORED)
        last = events.last_sequence
        events.close()
        number = -1
        while number < last:
            number = int.from_bytes(receive(subscriber)[1], "big")
        assert number == last
        events.close()


def test_batches_that_are_never_sent_count_as_dropped() -> None:
    with publisher() as events:
        events.publish([BlockRemoved(cast(Any, None))])  # no digest: cannot be encoded
        events._thread.join(120)
        assert events.num_dropped == 0
        events.publish(STORED)
        events.publish(STORED)
        assert events.num_dropped == 2


@pytest.mark.parametrize(
    ("enabled", "name", "expected"),
    [(True, None, True), (True, "zmq", True), (True, "null", False), (False, "zmq", False)],
)
def test_there_is_a_publisher_when_events_are_on_and_not_sent_to_nowhere(
    enabled: bool, name: str | None, expected: bool
) -> None:
    """Enabling means zmq unless the publisher is `null`, as in vLLM."""
    assert publishes(KvEventsConfig(enabled, name)) is expected


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
