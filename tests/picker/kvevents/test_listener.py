"""The listener receives events over real sockets, detects gaps and survives bad engines."""

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.errors import PickerError
from picker.framework.interfaces import KvEventFeed, KvEventSource, SkippedKvEvent
from picker.kvevents.listener import PART_BYTES, KvEventListener
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.support.picker.kv_scene import TOPIC, FakeEngine, Notebook, Stage, connected, stage


async def test_the_consumer_receives_messages_in_order() -> None:
    async with stage() as s:
        for number, payload in enumerate((b"one", b"two")):
            await s.engine.say(number, payload)
        await s.book.until(lambda: len(s.book.received) == 3)
        topic = TOPIC.decode()
        assert s.book.received == [
            ("default/a", "lost"),
            ("default/a", topic, "one"),
            ("default/a", topic, "two"),
        ]
        assert s.count("messages_received_total") == 2
        assert s.count("gaps_total") == 0


async def test_other_topics_are_ignored_and_malformed_messages_counted() -> None:
    async with stage() as s:
        await s.engine.say(0, b"not for us", b"metrics@x")
        await s.engine.pub.send_multipart((TOPIC, b"short", b"x"))
        await s.engine.pub.send_multipart((TOPIC,))
        await s.engine.say(0, b"bad")
        await s.engine.say(1, b"good")
        await s.book.until(lambda: "good" in s.book.payloads())
        assert s.book.payloads() == ["lost", "bad", "good"]
        assert s.listener.errors["default/a"] == 3


async def test_metrics_count_messages_errors_and_gaps_by_endpoint() -> None:
    async with stage() as s:
        await s.engine.say(0, b"one")
        await s.engine.say(2, b"bad")
        await s.engine.say(3, b"good")
        await s.book.until(lambda: "good" in s.book.payloads())
        events, pod = "llm_d_epp_kv_cache_events", {"pod_identifier": "default/a"}
        assert s.value(f"{events}_active_subscribers") == 1
        assert s.value(f"{events}_messages_received_total", **pod) == 3
        assert s.value(f"{events}_zmq_errors_total", operation="receive", **pod) == 1
        assert s.value("pointsman_kv_event_gaps_total", **pod) == 1
        s.datastore.set_endpoints([])
        s.listener._failed("invented", "no endpoint")
        unknown = {"pod_identifier": "unknown", "operation": "receive"}
        assert s.value(f"{events}_zmq_errors_total", **unknown) == 1
    assert s.value(f"{events}_active_subscribers") == 0


async def test_a_skipped_event_is_counted_always_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rest of its message is applied, so it is not an error."""
    async with stage() as s:
        for number in range(3):
            await s.engine.say(number, b"half %d" % number)
        await s.book.until(lambda: "half 2" in s.book.payloads())
        skipped = {"pod_identifier": "default/a", "reason": "unusable"}
        assert s.value("pointsman_kv_events_skipped_total", **skipped) == 3
        assert s.listener.errors["default/a"] == 0
    logged = [one for one in caplog.messages if "skipped an event" in one]
    assert logged == ["KV events of default/a: skipped an event and will skip others like it: half"]


async def test_a_large_message_is_applied_in_parts() -> None:
    events = [["BlockRemoved", [number], "x" * 2000] for number in range(100)]
    whole = msgspec.msgpack.encode([1.0, events])
    seen = set[int]()

    async def other_work() -> None:
        while True:
            seen.add(len(s.book.received))
            await asyncio.sleep(0)

    async with stage() as s:
        task = asyncio.create_task(other_work())
        await s.engine.say(0, whole)
        await s.engine.say(1, msgspec.msgpack.encode([1.0, ["last"]]))
        await s.book.until(lambda: "last" in s.book.payloads()[-1])
        task.cancel()
        parts = len(s.book.payloads()) - 2
        assert parts == len(whole) // PART_BYTES
        assert seen >= set(range(2, parts + 1))
        assert s.count("messages_received_total") == 2
        assert s.count("gaps_total") == 0


async def test_a_listener_that_joins_late_requests_a_replay() -> None:
    async with stage(replays=True, n0=b"zero", n1=b"one") as s:
        await s.book.until(lambda: "one" in s.book.payloads())
        await s.engine.say(2, b"two")
        await s.book.until(lambda: "two" in s.book.payloads())
        assert s.book.payloads() == ["lost", "zero", "one", "two"]
        assert s.engine.asked == [0]


async def test_a_replay_fills_a_gap() -> None:
    async with stage(replays=True) as s:
        await s.engine.answered.wait()
        await s.engine.say(0, b"zero")
        await s.book.until(lambda: "zero" in s.book.payloads())
        s.engine.replayable = [(n, str(n).encode()) for n in range(4)]
        await s.engine.say(3, b"3")
        await s.engine.say(4, b"4")
        await s.book.until(lambda: "4" in s.book.payloads())
        assert s.book.payloads() == ["lost", "zero", "1", "2", "3", "4"]
        assert s.engine.asked == [0, 1]


async def test_a_gap_without_a_replay_address_is_only_counted() -> None:
    async with stage() as s:
        await s.engine.say(0, b"0")
        await s.engine.say(5, b"5")
        await s.book.until(lambda: "5" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0", "5"]
        assert s.count("gaps_total") == 1


async def test_a_gap_that_the_replay_leaves_open_discards_the_endpoint() -> None:
    """The missing messages may contain removals."""
    async with stage(replays=True) as s:
        await s.engine.say(0, b"0")
        await s.book.until(lambda: "0" in s.book.payloads())
        s.engine.replayable = [(3, b"3"), (4, b"4")]
        await s.engine.say(4, b"4")
        await s.book.until(lambda: "4" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0", "lost", "3", "4"]


async def test_a_stalled_replay_continues_and_fails_without_progress() -> None:
    stored = {"n0": b"0", "n1": b"1", "n2": b"2"}
    async with stage(replays=True, answers_at_most=1, idle_seconds=0.05, **stored) as s:
        await s.book.until(lambda: s.book.payloads().count("lost") == 2)
        assert s.book.payloads()[-1] == "lost"
        assert s.count("replays_total", "failed") == 1
        # No other replay is tried during the cooldown.
        asked = len(s.engine.asked)
        await s.engine.say(9, b"9")
        await s.book.until(lambda: "9" in s.book.payloads())
        assert len(s.engine.asked) == asked


async def test_replayed_messages_without_a_topic_wait_for_one() -> None:
    """The first message of the subscription has the topic, which names the model."""
    async with stage(replays=True, with_topic=False, n0=b"0", n1=b"1") as s:
        await s.engine.say(1, b"1")
        await s.book.until(lambda: "1" in s.book.payloads())
        topic = TOPIC.decode()
        assert s.book.received[1:] == [("default/a", topic, "0"), ("default/a", topic, "1")]


async def test_a_lower_number_reveals_a_restart() -> None:
    async with stage() as s:
        for number in range(3):
            await s.engine.say(number, b"old")
        await s.engine.say(1, b"new")
        await s.book.until(lambda: "new" in s.book.payloads())
        assert s.book.payloads() == ["lost", "old", "old", "old", "lost", "new"]
        assert s.count("restarts_total") == 1


async def test_subscriptions_follow_the_endpoints_of_the_pool() -> None:
    async with stage() as s:
        with zmq.asyncio.Context() as context:
            other = FakeEngine(context)
            s.book.sources["default/b"] = KvEventSource(other.source.address)
            endpoints = [Endpoint(name, "127.0.0.1", 8000) for name in "bc"]
            s.datastore.set_endpoints(endpoints)
            await other.subscribed()
            await other.say(0, b"hello")
            await s.book.until(lambda: "hello" in s.book.payloads("default/b"))
            assert await s.engine.pub.recv() == b"\x00kv@"  # unsubscribed
            await s.engine.say(0, b"unheard")
            await other.say(1, b"bye")
            await s.book.until(lambda: "bye" in s.book.payloads("default/b"))
            assert s.book.payloads() == ["lost"]
            assert s.book.payloads("default/c") == []
            other.close()


async def test_the_topic_identifies_an_engine_that_connects(tmp_path: object) -> None:
    book, datastore = Notebook(feed=KvEventFeed(f"ipc://{tmp_path}/kv", "kv@")), Datastore()
    datastore.set_endpoints(
        [Endpoint("a", "10.0.0.1", 8000), Endpoint("b", "10.0.0.1", 8001, rank_index=1)]
    )
    async with connected(book, datastore) as (pub, listener):
        for pod in ("10.0.0.1:8001", "10.9.9.9:1", "10.0.0.1:8000"):
            await pub.send_multipart((f"kv@{pod}@m".encode(), bytes(8), pod.encode()))
        await book.until(lambda: len(book.received) == 2)
    assert [(what[0], what[-1]) for what in book.received] == [
        ("default/b", "10.0.0.1:8001"),
        ("default/a", "10.0.0.1:8000"),
    ]
    assert listener.errors == {"unknown": 1}


async def test_an_address_that_cannot_be_bound_is_an_error() -> None:
    listener = KvEventListener(Notebook(feed=KvEventFeed("tcp://no-such-device:1")), Datastore())
    with pytest.raises(PickerError, match="cannot listen"):
        await listener.run()


async def reconnect(s: Stage, replayable: list[tuple[int, bytes]], last: str) -> None:
    address = s.engine.source.address
    s.engine.fall_silent()
    s.engine.replayable = replayable
    with zmq.asyncio.Context() as context:
        again = context.socket(zmq.XPUB)
        again.bind(address)
        await s.book.until(lambda: last in s.book.payloads())
        again.close(linger=0)


@pytest.mark.parametrize("further", [0, 3])
async def test_a_reconnect_reveals_a_restart_of_a_silent_engine(further: int) -> None:
    async with stage(replays=True, n0=b"a0", n1=b"a1", n2=b"a2") as s:
        await s.book.until(lambda: "a2" in s.book.payloads())
        news = [f"b{n}" for n in range(1 + further)]
        await reconnect(s, [(n, one.encode()) for n, one in enumerate(news)], news[-1])
        assert s.book.payloads() == ["lost", "a0", "a1", "a2", "lost", *news]
        assert s.count("restarts_total") == 1


async def test_a_reconnect_to_the_same_engine_applies_only_missed_messages() -> None:
    async with stage(replays=True, n0=b"a0", n1=b"a1") as s:
        await s.book.until(lambda: "a1" in s.book.payloads())
        await reconnect(s, [*s.engine.replayable, (2, b"a2")], "a2")
        assert s.book.payloads() == ["lost", "a0", "a1", "a2"]
        assert s.engine.asked == [0, 1]


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
