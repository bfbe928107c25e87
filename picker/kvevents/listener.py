"""Receives the KV-cache events of engines over ZMQ for one consumer.

Messages lost in a reconnect appear as a gap in the numbers (`prefix.kv_stream`) and are requested
again: the request is an empty frame and the first number wanted, the answer the original messages
and one with an empty payload. After every handshake the listener requests the last applied message:
an engine that does not repeat exactly that has restarted, even if it sends nothing else. If a
replay fails, the endpoint's blocks are forgotten, because it is unknown which of them the engine
has evicted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash
import zmq
import zmq.asyncio

from picker.errors import PickerError
from picker.framework.interfaces import KvEventConsumer, KvEventSource, SkippedKvEvent
from picker.metrics.picker_metrics import KvSeries
from picker.pool.datastore import Datastore, EndpointChanges
from picker.prefix.kv_event_codec import parse_topic, split_message
from picker.prefix.kv_stream import Continuity, EventStream

log = logging.getLogger(__name__)

UNKNOWN_POD = "unknown"
NUMBER_BYTES = 8
_END_NUMBERS = 2**63  # from here on negative as int64, which no message number is
_MAX_UNREAD = 100_000  # messages that ZMQ queues during a replay
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
MAX_MESSAGE_BYTES = 256 * 2**20  # an engine may announce its whole cache
PART_BYTES = 32 * 1024  # of a message, applied within some two milliseconds
RETRY_SECONDS = 5.0  # until a failed subscription is retried


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    idle_seconds: float = 2.0
    total_seconds: float = 120.0  # engines keep 10,000 batches
    attempts_without_progress: int = 3
    cooldown_seconds: float = 30.0
    max_concurrent: int = 8  # replays fill the event loop


@dataclass(slots=True)
class _Engine:
    key: str  # of its endpoint
    replay_address: str | None = None
    stream: EventStream = field(default_factory=EventStream)
    topic: str | None = None  # of its last message; None before the first
    last_digest: bytes = b""  # of the payload that was applied last
    is_unconfirmed: bool = False  # reconnected, and may have restarted meanwhile
    no_replay_before: float = float("-inf")


class KvEventListener:
    """Feeds one consumer until `run` ends. Owns the sockets and the stream state of each engine."""

    def __init__(
        self,
        consumer: KvEventConsumer,
        datastore: Datastore,
        replay: ReplaySettings = ReplaySettings(),
        series: KvSeries | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._consumer = consumer
        self._datastore = datastore
        self._replay = replay
        self._series = KvSeries([]) if series is None else series
        self._retry_seconds = retry_seconds
        self._replays = asyncio.Semaphore(replay.max_concurrent)
        self._changed = asyncio.Event()
        self._connected: dict[str, _Engine] = {}  # engines that connect to the picker, by endpoint
        self._keys: dict[str, str] = {}  # keys by address; an engine sends either as its pod
        self._touched: dict[str, None] = {}  # endpoints whose subscription may have to change
        self.errors: Counter[str] = Counter()  # by endpoint
        self._skipped: dict[str, set[str]] = {}  # reasons already logged, by endpoint

    async def run(self) -> None:
        """Listen until cancelled. Raises `PickerError` when the address cannot be bound."""
        feed = self._consumer.kv_event_feed
        self._datastore.subscribe(self._note_changes)
        known = self._datastore.snapshot().candidates
        self._note_changes(EndpointChanges(tuple(one.endpoint for one in known), ()))
        try:
            with zmq.asyncio.Context() as context:
                # ZMQ's default of 1,023 sockets is enough for 500 engines only.
                context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
                if feed.bind_address is None:
                    await self._follow_endpoints(context)
                else:
                    await self._serve(context, feed.bind_address)
        finally:
            self._datastore.unsubscribe(self._note_changes)

    def _note_changes(self, changes: EndpointChanges) -> None:
        for endpoint in changes.removed:
            self._connected.pop(endpoint.key, None)
            self.errors.pop(endpoint.key, None)
            self._skipped.pop(endpoint.key, None)
            if self._keys.get(endpoint.host_port) == endpoint.key:
                del self._keys[endpoint.host_port]
        for endpoint in changes.added:
            self._keys.setdefault(endpoint.host_port, endpoint.key)
        if self._consumer.kv_event_feed.bind_address is None:
            touched = (*changes.removed, *changes.added, *changes.updated)
            self._touched.update((one.key, None) for one in touched)
        self._changed.set()

    # Engines that the picker connects to

    async def _follow_endpoints(self, context: zmq.asyncio.Context) -> None:
        listening: dict[str, tuple[KvEventSource, asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                touched, self._touched = self._touched, {}
                for key in touched:
                    source = self._source_of(key)
                    before = listening.get(key)
                    if before is not None and before[0] != source:
                        before[1].cancel()
                        del listening[key]
                    if source is not None and key not in listening:
                        following = self._follow(context, key, source)
                        task = group.create_task(following, name=f"kv-events {key}")
                        listening[key] = (source, task)
                await self._changed.wait()

    def _source_of(self, key: str) -> KvEventSource | None:
        candidate = self._datastore.get(key)
        return None if candidate is None else self._consumer.kv_event_source(candidate.endpoint)

    async def _follow(self, context: zmq.asyncio.Context, key: str, source: KvEventSource) -> None:
        while True:
            self._consumer.kv_events_lost(key)  # or a replay would store its blocks twice
            await self._follow_once(context, _Engine(key, source.replay_address), source)
            await asyncio.sleep(self._retry_seconds)

    async def _follow_once(
        self, context: zmq.asyncio.Context, engine: _Engine, source: KvEventSource
    ) -> None:
        prefix = self._consumer.kv_event_feed.topic_prefix
        try:
            with self._listening(), open_socket(context, zmq.SUB, source.address) as sub:
                monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                sub.subscribe(prefix)
                sub.connect(source.address)
                try:
                    await self._listen(context, engine, sub, monitor)
                finally:
                    sub.disable_monitor()
                    monitor.close(linger=0)
        except zmq.ZMQError as error:
            self._failed(engine.key, f"cannot listen at {source.address}: {error}")

    async def _listen(
        self,
        context: zmq.asyncio.Context,
        engine: _Engine,
        sub: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
    ) -> None:
        """Apply messages, and request a replay after every handshake."""
        poller = zmq.asyncio.Poller()
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                await monitor.recv_multipart()
                engine.is_unconfirmed = engine.stream.applied is not None
                await self._fill(context, engine)
            if sub in ready:
                await self._take(context, engine, await sub.recv_multipart())

    # Engines that connect to the picker

    async def _serve(self, context: zmq.asyncio.Context, address: str) -> None:
        with self._listening(), open_socket(context, zmq.SUB, address) as sub:
            sub.subscribe(self._consumer.kv_event_feed.topic_prefix)
            try:
                sub.bind(address)
            except zmq.ZMQError as error:
                raise PickerError(f"cannot listen for KV events on {address}: {error}") from error
            while True:
                frames = await sub.recv_multipart()
                pod = parse_topic(frames[0].decode(errors="replace")).pod
                key = self._key_of(pod)
                if key is None:
                    # Under one label, because a client may call itself anything.
                    self._failed(UNKNOWN_POD, f"pod {pod!r:.100} is not in the pool")
                    continue
                engine = self._connected.setdefault(key, _Engine(key))
                await self._take(context, engine, frames)

    def _key_of(self, pod: str) -> str | None:
        return pod if self._datastore.get(pod) is not None else self._keys.get(pod)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self._series.active_subscribers.inc()
        try:
            yield
        finally:
            self._series.active_subscribers.dec()

    # Messages

    async def _take(
        self, context: zmq.asyncio.Context, engine: _Engine, frames: Sequence[bytes]
    ) -> None:
        message = read_message(frames)
        if message is None:
            self._failed(engine.key, f"malformed message of {len(frames)} frames")
            return
        self._series.messages_received_total.labels(engine.key).inc()
        engine.topic = message.topic
        stream, now = engine.stream, asyncio.get_running_loop().time()
        found = stream.receive(message.number, now)
        if found is Continuity.RESTARTED:
            self._restart(engine)
            found = stream.receive(message.number, now)
        if found is Continuity.GAP:
            self._series.gaps_total.labels(engine.key).inc()
            await self._fill(context, engine)
        if stream.applied is None or message.number > stream.applied:
            await self._apply(engine, message)

    def _restart(self, engine: _Engine) -> None:
        self._series.restarts_total.labels(engine.key).inc()
        self._consumer.kv_events_lost(engine.key)
        engine.stream.reset()
        engine.is_unconfirmed = False

    async def _apply(self, engine: _Engine, message: Message) -> None:
        engine.stream.mark_applied(message.number)
        engine.last_digest = xxhash.xxh3_128_digest(message.payload)
        topic, is_first = message.topic or engine.topic or "", True
        for part in split_message(message.payload, PART_BYTES):
            if not is_first:
                await asyncio.sleep(0)  # the loop serves requests between the parts
            is_first = False
            if self._datastore.get(engine.key) is None:
                return  # it has just left the pool, so its blocks would never be removed
            self._consume(engine, topic, part)

    def _consume(self, engine: _Engine, topic: str, payload: bytes) -> None:
        try:
            for one in self._consumer.kv_events(engine.key, topic, payload):
                self._skip(engine.key, one)
        except PickerError as error:
            self._failed(engine.key, str(error))
        except Exception as error:
            # A bug in the consumer must not stop the listener for all engines.
            if not self.errors[engine.key]:
                log.exception("cannot process a message of %s", engine.key)
            self._failed(engine.key, repr(error))
            self._consumer.kv_events_lost(engine.key)

    def _failed(self, key: str, reason: str) -> None:
        self.errors[key] += 1
        pod = UNKNOWN_POD if self._datastore.get(key) is None else key
        self._series.zmq_errors_total.labels(pod, "receive").inc()
        count = self.errors[key]
        if count & (count - 1) == 0:  # the first, second, fourth, …
            log.warning("KV events of %s: %s (%d so far)", key, reason, count)

    def _skip(self, key: str, event: SkippedKvEvent) -> None:
        self._series.skipped_total.labels(key, event.reason).inc()
        known = self._skipped.setdefault(key, set())
        if event.reason not in known:
            known.add(event.reason)
            log.warning(
                "KV events of %s: skipped an event and will skip others like it: %s",
                key,
                event.text,
            )

    # Replay

    async def _fill(self, context: zmq.asyncio.Context, engine: _Engine) -> None:
        """Request the missing messages, if possible; forget the endpoint's blocks if that fails."""
        clock = asyncio.get_running_loop().time
        # Then the index lists removed blocks until they are stored and removed again.
        if engine.replay_address is None or clock() < engine.no_replay_before:
            return
        async with self._replays:
            self._series.replays_total.labels(engine.key, "asked").inc()
            deadline, attempts = clock() + self._replay.total_seconds, 0
            while attempts < self._replay.attempts_without_progress and clock() < deadline:
                before = engine.stream.wanted
                if await self._ask(context, engine, engine.replay_address, deadline):
                    engine.stream.end_replay(clock())
                    return
                attempts = 0 if engine.stream.wanted > before else attempts + 1
        self._series.replays_total.labels(engine.key, "failed").inc()
        self._failed(engine.key, f"the replay from {engine.replay_address} failed")
        self._consumer.kv_events_lost(engine.key)
        engine.is_unconfirmed = False
        engine.no_replay_before = clock() + self._replay.cooldown_seconds

    async def _ask(
        self, context: zmq.asyncio.Context, engine: _Engine, address: str, deadline: float
    ) -> bool:
        """Request one replay. Return True if it was complete by `deadline` (loop clock)."""
        clock = asyncio.get_running_loop().time
        with open_socket(context, zmq.DEALER, address) as dealer:
            dealer.connect(address)
            first = engine.stream.wanted - engine.is_unconfirmed
            await dealer.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
            while True:
                try:
                    until = min(deadline, clock() + self._replay.idle_seconds)
                    async with asyncio.timeout_at(until):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    return False
                if not frames[-1]:
                    if not engine.is_unconfirmed:
                        return True
                    self._restart(engine)  # its numbers have not got this far
                    return False
                message = read_message(frames[1:])
                if message is None:
                    self._failed(engine.key, f"malformed replayed message of {len(frames)} frames")
                elif message.topic is None and engine.topic is None:
                    return True  # the model is unknown until the subscription delivers
                elif not await self._take_replayed(engine, message):
                    return False

    async def _take_replayed(self, engine: _Engine, message: Message) -> bool:
        """Process a replayed message. Return False if the engine restarted: replay from 0."""
        stream = engine.stream
        if engine.is_unconfirmed:
            engine.is_unconfirmed = False
            if message.number == stream.applied:
                if xxhash.xxh3_128_digest(message.payload) == engine.last_digest:
                    return True
                self._restart(engine)
                return False
        if message.number >= stream.wanted:
            if message.number > stream.wanted > 0:  # the gap may contain removals
                self._consumer.kv_events_lost(engine.key)
            await self._apply(engine, message)
        return True


@dataclass(frozen=True, slots=True)
class Message:
    """A message of an engine. A replayed message may have no topic (None)."""

    topic: str | None
    number: int
    payload: bytes


def read_message(frames: Sequence[bytes]) -> Message | None:
    """Read a message from three frames, or two without the topic; None for any others."""
    if not 2 <= len(frames) <= 3 or len(frames[-2]) != NUMBER_BYTES:
        return None
    number = int.from_bytes(frames[-2], "big")
    if number >= _END_NUMBERS:
        return None
    topic = frames[0].decode(errors="replace") if len(frames) == 3 else None
    return Message(topic, number, frames[-1])


@contextmanager
def open_socket(
    context: zmq.asyncio.Context, kind: int, address: str
) -> Iterator[zmq.asyncio.Socket]:
    socket = context.socket(kind)
    try:
        socket.set_hwm(_MAX_UNREAD)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        yield socket
    finally:
        socket.close(linger=0)
