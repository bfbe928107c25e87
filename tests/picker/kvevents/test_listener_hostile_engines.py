"""Whatever engines do, the others are heard on, and nothing of them is kept for ever."""

from __future__ import annotations

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


async def test_engines_that_connect_leave_nothing_behind_when_their_endpoints_go(
    tmp_path: object,
) -> None:
    """What a pod calls itself is not kept; one that comes back is heard from its beginning."""
    book, datastore = Notebook(feed=KvEventFeed(f"ipc://{tmp_path}/kv", "kv@")), Datastore()
    here = Endpoint("a", "10.0.0.1", 8000)
    datastore.set_endpoints([here])
    async with connected(book, datastore) as (pub, listener):
        for number in range(20):
            await pub.send_multipart((b"kv@%d@m" % number, bytes(8), b"invented"))
        for payload in (b"first", b"again"):
            said = payload.decode()
            await pub.send_multipart((b"kv@10.0.0.1:8000@m", bytes(8), payload))
            await book.until(lambda said=said: said in book.payloads())
            datastore.set_endpoints([])
            assert not listener._connected
            datastore.set_endpoints([here])
        assert listener.errors == {"unknown": 20}
        assert book.payloads() == ["first", "again"]


async def test_a_mistake_of_ours_does_not_end_listening() -> None:
    """It is logged and counted, and the endpoint forgotten: part of it may have been taken in."""
    async with stage() as s:
        for number, payload in enumerate((b"one", b"mistake", b"two")):
            await s.engine.say(number, payload)
        await s.book.until(lambda: "two" in s.book.payloads())
        assert s.book.payloads() == ["lost", "one", "mistake", "lost", "two"]
        assert s.listener.errors["default/a"] == 1


async def test_a_number_that_no_message_has_is_refused() -> None:
    """The end of a replay, said the ordinary way, and numbers behind it."""
    async with stage() as s:
        for number in (2**64 - 1, 2**63, 0):
            await s.engine.say(number, b"%d" % number)
        await s.book.until(lambda: "0" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0"]
        assert s.listener.errors["default/a"] == 2


async def test_an_endpoint_that_has_left_says_nothing_any_more() -> None:
    """Messages that are there already are not taken in: nobody would forget them."""

    @dataclass
    class Remover(Notebook):
        datastore: Datastore = field(default_factory=Datastore)

        def kv_events(self, key: str, topic: str, payload: bytes) -> Sequence[SkippedKvEvent]:
            self.datastore.set_endpoints([])
            return super().kv_events(key, topic, payload)

    with zmq.asyncio.Context() as context:
        engine = FakeEngine(context)
        engine.kept = [(number, b"%d" % number) for number in range(200)]
        book = Remover({"default/a": engine.source})
        book.datastore.set_endpoints([Endpoint("a", "127.0.0.1", 8000)])
        listener = KvEventListener(book, book.datastore)
        tasks = [asyncio.create_task(listener.run()), asyncio.create_task(engine.replay())]
        try:
            await engine.subscribed()
            await book.until(lambda: "0" in book.payloads())
            async with asyncio.timeout(60):
                assert await engine.pub.recv() == b"\x00kv@"  # it is not listened to any more
            assert book.payloads() == ["lost", "0"]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            engine.close()


async def test_an_engine_that_cannot_be_listened_to_is_tried_again() -> None:
    """There may be a socket free by then."""
    book, datastore = Notebook({"default/a": KvEventSource("foo://10.0.0.1")}), Datastore()
    datastore.set_endpoints([Endpoint("a", "127.0.0.1", 8000)])
    task = asyncio.create_task(KvEventListener(book, datastore, retry_seconds=0.001).run())
    await book.until(lambda: len(book.heard) == 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert book.payloads() == ["lost"] * 3


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open ones as there may be; without asking that is often fewer than sockets here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_more_engines_are_listened_to_than_zmq_has_sockets_by_itself(
    many_files: None,
) -> None:
    names = [f"w{number}" for number in range(600)]
    book = Notebook({f"default/{name}": KvEventSource("tcp://127.0.0.1:1") for name in names})
    datastore = Datastore()
    datastore.set_endpoints([Endpoint(name, "127.0.0.1", 1) for name in names])
    listener = KvEventListener(book, datastore)
    task = asyncio.create_task(listener.run())
    await book.until(lambda: len(book.heard) == len(names))
    await asyncio.sleep(0)
    errors = dict(listener.errors)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert errors == {}
