"""Publishes over ZMQ what the prefix cache holds, as vLLM 0.32 does, and never delays the engine.

The engine's thread numbers one batch per step and hands it over through a bounded queue; a thread
of the publisher's own encodes and sends. When the queue is full, all its batches are dropped; in
their place goes one that says `AllBlocksCleared` and then all that is cached at that moment. The
engine's thread, which owns the cache, builds that batch within the call that found the queue full:
so no event is missing or reported twice. Numbers of dropped batches are never sent, so a subscriber
sees the gap. docs/kv-events.md has the frames, the payload and the replay of batches.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import msgspec
import zmq

from worker.config import KvEventsConfig
from worker.engine.cache.block_hash import BlockHash, key_of, short_hash
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import ConfigError

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_CLOSE_SECONDS = 1.0
_LINGER_MS = 500

_Batch = tuple[int, float, Sequence[CacheEvent]]  # number, wall-clock seconds, events


def publishes(config: KvEventsConfig) -> bool:
    return config.enable_kv_cache_events and config.publisher != "null"


class KvEventPublisher:
    """Sole owner of the event sockets and their thread. Its methods belong to the thread that owns
    the cache.

    `announce` gives the events that report everything cached now; it is called within `publish`.
    `clock` is the wall clock. Raises ConfigError when an endpoint cannot be bound or connected to.
    """

    def __init__(
        self,
        config: KvEventsConfig,
        block_size: int,
        announce: Callable[[], Sequence[CacheEvent]],
        clock: Callable[[], float],
    ) -> None:
        self._announce = announce
        self._clock = clock
        self._max_queued = config.max_queue_size
        self._queue: deque[_Batch] = deque()
        self._next_number = 0
        self._num_dropped = 0
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._wake = self._context.socket(zmq.PAIR)
            self._wake.bind("inproc://wake")
            self._sender = _Sender(self._context, config, block_size, self._queue, self._closing)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: {error}") from error
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()
        self._enqueue([CacheCleared()])

    @property
    def endpoint(self) -> str:
        """The address in use, with the port that was chosen if the configuration leaves it open."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        return self._sender.replay_endpoint

    @property
    def last_sequence(self) -> int:
        """The number of the last batch, sent or queued."""
        return self._next_number - 1

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue one step's events, which the cache already reflects. Never blocks."""
        if not self._thread.is_alive():  # it failed, or was closed: this is never sent
            self._num_dropped += 1
            return
        if len(self._queue) < self._max_queued:
            self._enqueue(events)
            return
        # All of them: the rest makes no sense to a subscriber that missed the first.
        while self._queue:
            try:
                self._queue.popleft()
            except IndexError:  # the sender took the last one meanwhile
                break
            self._num_dropped += 1
        logger.warning("KV events: the queue was full; everything cached is announced anew")
        self._enqueue(self._announce())

    def close(self) -> None:
        """Send what is queued, waiting only a moment, and stop. Idempotent."""
        if not self._wake.closed:
            self._closing.set()
            self._notify()
            self._thread.join(_CLOSE_SECONDS)
            self._wake.close(linger=0)
            if not self._thread.is_alive():
                self._context.term()

    def _enqueue(self, events: Sequence[CacheEvent]) -> None:
        self._queue.append((self._next_number, self._clock(), events))
        self._next_number += 1
        self._notify()

    def _notify(self) -> None:
        with suppress(zmq.Again):  # unread ones will wake the sender anyway
            self._wake.send(b"", zmq.DONTWAIT)


class _Sender:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: KvEventsConfig,
        block_size: int,
        queue: deque[_Batch],
        closing: threading.Event,
    ) -> None:
        self._queue = queue
        self._closing = closing
        self._encoder = EventEncoder(block_size, config.format, config.int_block_hashes)
        self._topic = config.topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._wake = context.socket(zmq.PAIR)
        self._wake.connect("inproc://wake")
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.IPV6, _is_ipv6(config.endpoint))
        self._pub.setsockopt(zmq.LINGER, _LINGER_MS)
        if _is_to_bind(config.endpoint):
            self._pub.bind(config.endpoint)
            self.endpoint = cast(bytes, self._pub.getsockopt(zmq.LAST_ENDPOINT)).decode()
        else:
            self._pub.connect(config.endpoint)
            self.endpoint = config.endpoint
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replay = context.socket(zmq.ROUTER)
            # Room for one whole answer to each peer; more than that it did not wait to read.
            self._replay.set_hwm(config.buffer_steps + 1)
            self._replay.setsockopt(zmq.IPV6, _is_ipv6(config.replay_endpoint))
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.bind(config.replay_endpoint)
            endpoint = cast(bytes, self._replay.getsockopt(zmq.LAST_ENDPOINT))
            self.replay_endpoint = endpoint.decode()

    def run(self) -> None:
        try:
            self._serve()
        except Exception:
            # The engine continues without: from here on every batch counts as dropped.
            logger.exception("the publisher of KV events failed")
        finally:
            for socket in (self._wake, self._pub, self._replay):
                if socket is not None:
                    socket.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if self._wake in ready:
                self._wake.recv()
            self._send_queued()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._send_queued()

    def _send_queued(self) -> None:
        while self._queue:
            try:
                number, seconds, events = self._queue.popleft()
            except IndexError:  # the engine dropped it meanwhile
                return
            payload = self._encoder.encode(events, seconds)
            self._sent.append((number, payload))
            self._pub.send_multipart((self._topic, _number(number), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != _NUMBER_BYTES:
            logger.debug("KV events: ignored a replay request of %d frames", len(frames))
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._sent:
            if number >= start:
                replay.send_multipart((peer, b"", self._topic, _number(number), payload))
        replay.send_multipart((peer, b"", b"", _END_OF_REPLAY, b""))


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def _is_to_bind(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _is_ipv6(endpoint: str) -> bool:
    return "[" in endpoint or "::" in endpoint


ExternalHash = int | bytes


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True):
    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, frozen=True):
    block_hashes: list[ExternalHash]
    medium: str | None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    pass


class _StoredArray(_StoredMap, tag="BlockStored", array_like=True, frozen=True):
    pass


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True, frozen=True):
    pass


class _ClearedArray(_ClearedMap, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


class EventEncoder:
    """Turns cache events into the payload of a batch. `form` is "map" or "array"."""

    def __init__(
        self, block_size: int, form: str = "map", int_hashes: bool = True, rank: int = 0
    ) -> None:
        self._block_size = block_size
        self._stored: type[_StoredMap] = _StoredMap if form == "map" else _StoredArray
        self._removed: type[_RemovedMap] = _RemovedMap if form == "map" else _RemovedArray
        self._cleared: type[_ClearedMap] = _ClearedMap if form == "map" else _ClearedArray
        self._name: Callable[[bytes], ExternalHash] = short_hash if int_hashes else bytes
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[CacheEvent], seconds: float) -> bytes:
        return self._encoder.encode([seconds, [self._event(e) for e in events], self._rank])

    def _event(self, event: CacheEvent) -> msgspec.Struct:
        if isinstance(event, BlocksStored):
            return self._stored(
                block_hashes=[self._name(block.digest) for block in event.blocks],
                parent_block_hash=None if event.parent is None else self._name(event.parent),
                token_ids=[token for block in event.blocks for token in block.token_ids],
                block_size=self._block_size,
                lora_id=event.blocks[0].adapter_number,
                medium=event.medium,
                lora_name=key_of(event.blocks[0].extra, "lora"),
                extra_keys=_extra_keys(event.blocks),
            )
        if isinstance(event, BlockRemoved):
            return self._removed(block_hashes=[self._name(event.digest)], medium=event.medium)
        return self._cleared()


def _extra_keys(blocks: Sequence[BlockHash]) -> list[list[str] | None] | None:
    if all(block.extra is None for block in blocks):
        return None
    return [None if block.extra is None else [key[1] for key in block.extra] for block in blocks]
