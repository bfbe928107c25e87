"""The KV event publisher over real sockets: frames, numbers, replay, overflow, both directions."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest
import zmq

from worker.config import KvEventsConfig
from worker.engine.cache.block_hash import BlockHash
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.engine.process.kv_events import KvEventPublisher, publishes
from worker.errors import ConfigError

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
    assert events.replay_endpoint is not None
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
    """A central consumer listens and workers connect."""
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
    """With a star in the endpoint the worker listens."""
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


def test_a_full_queue_never_blocks_and_ends_in_a_full_announcement(
    context: zmq.Context[Any],
) -> None:
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
