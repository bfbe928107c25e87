"""The listener hears engines over real sockets, notices what it missed, and asks for it again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.errors import PickerError
from picker.framework.interfaces import KvEventFeed, KvEventSource
from picker.kvevents.listener import PART_BYTES, KvEventListener
from picker.pool.datastore import Datastore
from picker.types import Endpoint
from tests.support.picker.kv_scene import TOPIC, FakeEngine, Notebook, connected, stage


async def test_messages_are_handed_on_in_order() -> None:
    """With the endpoint's key and the topic; what was known before is forgotten first."""
    async with stage() as s:
        for number, payload in enumerate((b"one", b"two")):
            await s.engine.say(number, payload)
        await s.book.until(lambda: len(s.book.heard) == 3)
        topic = TOPIC.decode()
        assert s.book.heard == [
            ("default/a", "lost"),
            ("default/a", topic, "one"),
            ("default/a", topic, "two"),
        ]
        assert s.count("messages_received_total") == 2
        assert s.count("gaps_total") == 0


async def test_other_topics_and_nonsense_are_passed_over() -> None:
    """What has not three frames, and what the consumer cannot understand, is counted."""
    async with stage() as s:
        await s.engine.say(0, b"not for us", b"metrics@x")
        await s.engine.pub.send_multipart((TOPIC, b"short", b"x"))
        await s.engine.pub.send_multipart((TOPIC,))
        await s.engine.say(0, b"bad")
        await s.engine.say(1, b"good")
        await s.book.until(lambda: "good" in s.book.payloads())
        assert s.book.payloads() == ["lost", "bad", "good"]
        assert s.listener.errors["default/a"] == 3


async def test_what_was_heard_is_told_to_operators() -> None:
    """By endpoint; whoever is none of the pool has no name of its own."""
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
    """The message that it stood in is taken in; an endpoint that joins again is logged again."""
    async with stage() as s:
        for number in range(3):
            await s.engine.say(number, b"half %d" % number)
        await s.book.until(lambda: "half 2" in s.book.payloads())
        skipped = {"pod_identifier": "default/a", "reason": "unusable"}
        assert s.value("pointsman_kv_events_skipped_total", **skipped) == 3
        assert s.listener.errors["default/a"] == 0
    logged = [one for one in caplog.messages if "skipped an event" in one]
    assert logged == ["KV events of default/a: skipped an event and will skip others like it: half"]


async def test_a_large_message_is_taken_in_part_by_part() -> None:
    """Other tasks get their turns; the numbers are those of the message."""
    events = [["BlockRemoved", [number], "x" * 2000] for number in range(100)]
    whole = msgspec.msgpack.encode([1.0, events])
    seen = set[int]()

    async def other_work() -> None:
        while True:
            seen.add(len(s.book.heard))
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


async def test_what_was_said_before_is_asked_for_when_joining() -> None:
    """From the first message on; ordinary messages go on behind it."""
    async with stage(replays=True, n0=b"zero", n1=b"one") as s:
        await s.book.until(lambda: "one" in s.book.payloads())
        await s.engine.say(2, b"two")
        await s.book.until(lambda: "two" in s.book.payloads())
        assert s.book.payloads() == ["lost", "zero", "one", "two"]
        assert s.engine.asked == [0]


async def test_a_gap_is_filled_by_asking_again() -> None:
    """What comes twice that way counts once."""
    async with stage(replays=True) as s:
        await s.engine.answered.wait()
        await s.engine.say(0, b"zero")
        await s.book.until(lambda: "zero" in s.book.payloads())
        s.engine.kept = [(n, str(n).encode()) for n in range(4)]
        await s.engine.say(3, b"3")
        await s.engine.say(4, b"4")
        await s.book.until(lambda: "4" in s.book.payloads())
        assert s.book.payloads() == ["lost", "zero", "1", "2", "3", "4"]
        assert s.engine.asked == [0, 1]


async def test_a_gap_that_nobody_can_fill_is_passed_over() -> None:
    async with stage() as s:
        await s.engine.say(0, b"0")
        await s.engine.say(5, b"5")
        await s.book.until(lambda: "5" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0", "5"]
        assert s.count("gaps_total") == 1


async def test_what_is_gone_from_the_replay_too_makes_the_endpoint_forgotten() -> None:
    """Nobody knows what left its cache meanwhile; what comes after counts."""
    async with stage(replays=True) as s:
        await s.engine.say(0, b"0")
        await s.book.until(lambda: "0" in s.book.payloads())
        s.engine.kept = [(3, b"3"), (4, b"4")]
        await s.engine.say(4, b"4")
        await s.book.until(lambda: "4" in s.book.payloads())
        assert s.book.payloads() == ["lost", "0", "lost", "3", "4"]


async def test_a_replay_that_stalls_goes_on_where_it_was() -> None:
    """One message for each request, and in the end none: then it has failed."""
    kept = {"n0": b"0", "n1": b"1", "n2": b"2"}
    async with stage(replays=True, answers_at_most=1, idle_seconds=0.05, **kept) as s:
        await s.book.until(lambda: s.book.payloads().count("lost") == 2)
        assert s.book.payloads()[-1] == "lost"
        assert s.count("replays_total", "failed") == 1
        # For a while no other is tried.
        asked = len(s.engine.asked)
        await s.engine.say(9, b"9")
        await s.book.until(lambda: "9" in s.book.payloads())
        assert len(s.engine.asked) == asked


async def test_replayed_messages_without_a_topic_wait_for_one() -> None:
    """Of which model they are is said by the first ordinary message."""
    async with stage(replays=True, with_topic=False, n0=b"0", n1=b"1") as s:
        await s.engine.say(1, b"1")
        await s.book.until(lambda: "1" in s.book.payloads())
        topic = TOPIC.decode()
        assert s.book.heard[1:] == [("default/a", topic, "0"), ("default/a", topic, "1")]


async def test_a_new_life_of_an_engine_is_noticed_by_its_numbers() -> None:
    """Also when its first messages were missed and cannot be had again."""
    async with stage() as s:
        for number in range(3):
            await s.engine.say(number, b"old")
        await s.engine.say(1, b"new")
        await s.book.until(lambda: "new" in s.book.payloads())
        assert s.book.payloads() == ["lost", "old", "old", "old", "lost", "new"]
        assert s.count("restarts_total") == 1


async def test_endpoints_are_followed_as_they_come_and_go() -> None:
    async with stage() as s:
        with zmq.asyncio.Context() as context:
            other = FakeEngine(context)
            s.book.sources["default/b"] = KvEventSource(other.source.address)
            endpoints = [Endpoint(name, "127.0.0.1", 8000) for name in "bc"]
            s.datastore.set_endpoints(endpoints)
            await other.subscribed()
            await other.say(0, b"hello")
            await s.book.until(lambda: "hello" in s.book.payloads("default/b"))
            assert await s.engine.pub.recv() == b"\x00kv@"  # nobody listens any more
            await s.engine.say(0, b"unheard")
            await other.say(1, b"bye")
            await s.book.until(lambda: "bye" in s.book.payloads("default/b"))
            assert s.book.payloads() == ["lost"]
            assert s.book.payloads("default/c") == []
            other.close()


async def test_engines_that_connect_are_told_apart_by_their_topics(tmp_path: object) -> None:
    """Of a pod that is not in the pool nothing is taken in."""
    book, datastore = Notebook(feed=KvEventFeed(f"ipc://{tmp_path}/kv", "kv@")), Datastore()
    datastore.set_endpoints(
        [Endpoint("a", "10.0.0.1", 8000), Endpoint("b", "10.0.0.1", 8001, rank_index=1)]
    )
    async with connected(book, datastore) as (pub, listener):
        for pod in ("10.0.0.1:8001", "10.9.9.9:1", "10.0.0.1:8000"):
            await pub.send_multipart((f"kv@{pod}@m".encode(), bytes(8), pod.encode()))
        await book.until(lambda: len(book.heard) == 2)
    assert [(what[0], what[-1]) for what in book.heard] == [
        ("default/b", "10.0.0.1:8001"),
        ("default/a", "10.0.0.1:8000"),
    ]
    assert listener.errors == {"unknown": 1}


async def test_an_address_that_cannot_be_bound_is_an_error() -> None:
    """The picker cannot do what it was told."""
    listener = KvEventListener(Notebook(feed=KvEventFeed("tcp://no-such-device:1")), Datastore())
    with pytest.raises(PickerError, match="cannot listen"):
        await listener.run()


@pytest.mark.parametrize("further", [0, 3])
async def test_a_new_life_that_says_nothing_is_noticed_when_connecting_again(further: int) -> None:
    """It has not got as far as the one before, or has said something else there."""
    async with stage(replays=True, n0=b"a0", n1=b"a1", n2=b"a2") as s:
        await s.book.until(lambda: "a2" in s.book.payloads())
        address = s.engine.source.address
        s.engine.fall_silent()
        s.engine.kept = [(n, b"b%d" % n) for n in range(1 + further)]
        with zmq.asyncio.Context() as context:
            again = context.socket(zmq.XPUB)
            again.bind(address)
            await s.book.until(lambda: f"b{further}" in s.book.payloads())
            again.close(linger=0)
        news = [f"b{n}" for n in range(1 + further)]
        assert s.book.payloads() == ["lost", "a0", "a1", "a2", "lost", *news]
        assert s.count("restarts_total") == 1


async def test_the_same_engine_is_not_heard_twice_when_connecting_again() -> None:
    """Only what was missed meanwhile is taken in."""
    async with stage(replays=True, n0=b"a0", n1=b"a1") as s:
        await s.book.until(lambda: "a1" in s.book.payloads())
        address = s.engine.source.address
        s.engine.fall_silent()
        s.engine.kept.append((2, b"a2"))
        with zmq.asyncio.Context() as context:
            again = context.socket(zmq.XPUB)
            again.bind(address)
            await s.book.until(lambda: "a2" in s.book.payloads())
            again.close(linger=0)
        assert s.book.payloads() == ["lost", "a0", "a1", "a2"]
        assert s.engine.asked == [0, 1]
