"""An engine that publishes and replays KV events, and a listener to it, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from picker.errors import PickerError
from picker.framework.interfaces import KvEventFeed, KvEventSource, SkippedKvEvent
from picker.kvevents.listener import KvEventListener, ReplaySettings
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.types import Endpoint

TOPIC = b"kv@127.0.0.1:8000@m"


@dataclass
class Notebook:
    """Refuses the payload `bad`, and skips an event of each payload that begins with `half`."""

    sources: dict[str, KvEventSource] = field(default_factory=dict)
    feed: KvEventFeed = field(default_factory=lambda: KvEventFeed(topic_prefix="kv@"))
    received: list[tuple[str, ...]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_event_feed(self) -> KvEventFeed:
        return self.feed

    def kv_event_source(self, endpoint: Endpoint) -> KvEventSource | None:
        return self.sources.get(endpoint.key)

    def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
        self.note(key, topic, payload.decode(errors="replace"))
        if payload == b"bad":
            raise PickerError("bad")
        if payload == b"mistake":
            raise RuntimeError("a mistake of ours")
        return [SkippedKvEvent("unusable", "half")] if payload.startswith(b"half") else []

    def kv_events_lost(self, key: str) -> None:
        self.note(key, "lost")

    def note(self, *what: str) -> None:
        self.received.append(what)
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def payloads(self, key: str = "default/a") -> list[str]:
        return [what[-1] for what in self.received if what[0] == key]


class FakeEngine:
    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.pub_context = zmq.asyncio.Context()
        self.pub = self.pub_context.socket(zmq.XPUB)
        self.router = context.socket(zmq.ROUTER)
        self.ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self.pub, self.router)]
        self.replayable: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.with_topic = True
        self.answers_at_most: int | None = None
        self.answered = asyncio.Event()

    @property
    def source(self) -> KvEventSource:
        address, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return KvEventSource(address, replay)

    async def subscribed(self) -> None:
        async with asyncio.timeout(60):
            await self.pub.recv()

    async def say(self, number: int, payload: bytes, topic: bytes = TOPIC) -> None:
        await self.pub.send_multipart((topic, number.to_bytes(8, "big"), payload))

    async def replay(self) -> None:
        while True:
            peer, empty, start = await self.router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            wanted = [one for one in self.replayable if one[0] >= first]
            topic = (TOPIC,) if self.with_topic else ()
            for number, payload in wanted[: self.answers_at_most]:
                await self.router.send_multipart(
                    (peer, empty, *topic, number.to_bytes(8, "big"), payload)
                )
            if self.answers_at_most is None:
                await self.router.send_multipart((peer, empty, *topic, b"\xff" * 8, b""))
            self.answered.set()

    def fall_silent(self) -> None:
        """Publish no more; when this returns, the port is free."""
        self.pub.close(linger=0)
        self.pub_context.term()

    def close(self) -> None:
        self.fall_silent()
        self.router.close(linger=0)


@dataclass
class Stage:
    engine: FakeEngine
    book: Notebook
    listener: KvEventListener
    datastore: Datastore
    metrics: PickerMetrics

    def value(self, series: str, /, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(series, labels)

    def count(self, attribute: str, *labels: str) -> float:
        return getattr(self.metrics.kv, attribute).labels("default/a", *labels)._value


@asynccontextmanager
async def connected(
    book: Notebook, datastore: Datastore
) -> AsyncIterator[tuple[zmq.asyncio.Socket, KvEventListener]]:
    listener = KvEventListener(book, datastore)
    task = asyncio.create_task(listener.run())
    with zmq.asyncio.Context() as context:
        pub = context.socket(zmq.XPUB)
        try:
            pub.connect(book.feed.bind_address)
            async with asyncio.timeout(60):
                await pub.recv()
            yield pub, listener
        finally:
            pub.close(linger=0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def stage(
    replays: bool = False,
    answers_at_most: int | None = None,
    with_topic: bool = True,
    idle_seconds: float = 60.0,
    **replayable: bytes,
) -> AsyncIterator[Stage]:
    with zmq.asyncio.Context() as context:
        engine = FakeEngine(context)
        engine.answers_at_most, engine.with_topic = answers_at_most, with_topic
        engine.replayable = [(int(number[1:]), payload) for number, payload in replayable.items()]
        source = engine.source if replays else KvEventSource(engine.source.address)
        book, datastore = Notebook({"default/a": source}), Datastore()
        datastore.set_endpoints([Endpoint("a", "127.0.0.1", 8000)])
        metrics = PickerMetrics()
        patience = ReplaySettings(
            idle_seconds=idle_seconds, attempts_without_progress=2, cooldown_seconds=60.0
        )
        listener = KvEventListener(book, datastore, patience, metrics.kv)
        tasks = [asyncio.create_task(listener.run()), asyncio.create_task(engine.replay())]
        try:
            await engine.subscribed()
            yield Stage(engine, book, listener, datastore, metrics)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            engine.close()
