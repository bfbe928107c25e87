"""A misbehaving engine neither stops the listener nor leaks memory."""

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import zmq
import zmq.asyncio

from picker.framework.interfaces import KvEventFeed, KvEventSource, SkippedKvEvent
from picker.kvevents.listener import KvEventListener
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.support.picker.kv_scene import FakeEngine, Notebook, connected, stage


async def test_an_endpoint_that_leaves_loses_its_stream_state(tmp_path: object) -> None:
    book, datastore = Notebook(feed=KvEventFeed(f"ipc://{tmp_path}/kv", "kv@")), Datastore()
    here = Endpoint("a", "10.0.0.1", 8000)
    datastore.set_endpoints([here])
    async with connected(book, datastore) as (pub, listener):
        for number in range(20):
            await pub.send_multipart((b"kv@%d@m" % number, bytes(8), b"invented"))
        for payload in (b"first", b"again"):
            await pub.send_multipart((b"kv@10.0.0.1:8000@m", bytes(8), payload))
            await book.until(lambda payload=payload: payload.decode() in book.payloads())
            datastore.set_endpoints([])
            assert not listener._connected
            datastore.set_endpoints([here])
        assert listener.errors == {"unknown": 20}
        assert book.payloads() == ["first", "again"]


async def test_a_bug_in_the_consumer_does_not_stop_the_listener() -> None:
    """The endpoint's blocks are discarded because the message may be partly applied."""
    async with stage() as s:
        for number, payload in enumerate((b"one", b"mistake", b"two")):
            await s.engine.say(number, payload)
        await s.book.until(lambda: "two" in s.book.payloads())
        assert s.book.payloads() == ["lost", "one", "mistake", "lost", "two"]
        assert s.listener.errors["default/a"] == 1


async def test_numbers_beyond_int64_are_refused() -> None:
    """One of them is -1, which marks the end of a replay."""
    async with stage() as s:
        for number in (2**64 - 1, 2**63, 0):
            await s.engine.say(number, b"%d" % number)
        await s.book.until(lambda: "0" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0"]
        assert s.listener.errors["default/a"] == 2


async def test_queued_messages_of_an_endpoint_that_left_are_dropped() -> None:
    """Otherwise nothing would ever remove their blocks."""

    @dataclass
    class Remover(Notebook):
        datastore: Datastore = field(default_factory=Datastore)

        def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
            self.datastore.set_endpoints([])
            return super().kv_events(key, topic, payload)

    with zmq.asyncio.Context() as context:
        engine = FakeEngine(context)
        engine.replayable = [(number, b"%d" % number) for number in range(200)]
        book = Remover({"default/a": engine.source})
        book.datastore.set_endpoints([Endpoint("a", "127.0.0.1", 8000)])
        listener = KvEventListener(book, book.datastore)
        tasks = [asyncio.create_task(listener.run()), asyncio.create_task(engine.replay())]
        try:
            await engine.subscribed()
            await book.until(lambda: "0" in book.payloads())
            async with asyncio.timeout(60):
                assert await engine.pub.recv() == b"\x00kv@"  # unsubscribed
            assert book.payloads() == ["lost", "0"]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            engine.close()


async def test_a_failed_subscription_is_retried() -> None:
    """A shortage of sockets may be temporary."""
    book, datastore = Notebook({"default/a": KvEventSource("foo://10.0.0.1")}), Datastore()
    datastore.set_endpoints([Endpoint("a", "127.0.0.1", 8000)])
    task = asyncio.create_task(KvEventListener(book, datastore, retry_seconds=0.001).run())
    await book.until(lambda: len(book.received) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert book.payloads() == ["lost"] * 3


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files to its maximum; the default may be below the sockets here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_pool_may_have_more_engines_than_zmq_has_sockets_by_default(
    many_files: None,
) -> None:
    names = [f"w{number}" for number in range(600)]
    book = Notebook({f"default/{name}": KvEventSource("tcp://127.0.0.1:1") for name in names})
    datastore = Datastore()
    datastore.set_endpoints([Endpoint(name, "127.0.0.1", 1) for name in names])
    listener = KvEventListener(book, datastore)
    task = asyncio.create_task(listener.run())
    await book.until(lambda: len(book.received) == len(names))
    await asyncio.sleep(0)
    errors = dict(listener.errors)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert errors == {}
