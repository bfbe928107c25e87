"""A reflector in virtual time: each change is published once, at once, and cheaply."""

import asyncio
import logging

import pytest

from tests.support.kube.reflector_scene import following

pytestmark = pytest.mark.looptime


async def test_a_reflector_lists_and_watches() -> None:
    async with following("a", "b") as scene:
        assert scene.reflector.synced
        assert scene.shown == {"a": "1", "b": "1"}
        scene.write("c")
        scene.write("a", "2")
        scene.erase("b")
        await asyncio.sleep(0.1)
        assert scene.shown == {"a": "2", "c": "1"}
        assert scene.published[-1] is scene.reflector.view
        assert scene.reflector.problem() is None


async def test_an_empty_list_is_published_too() -> None:
    async with following(first_seconds=0) as scene:
        assert not scene.reflector.synced
        await asyncio.sleep(1)
        assert scene.reflector.synced
        assert scene.published == [{}]


async def test_many_events_at_once_are_one_change() -> None:
    async with following() as scene:
        scene.published.clear()
        for number in range(500):
            scene.write(f"n{number}")
        await asyncio.sleep(0.1)
        assert [len(view) for view in scene.published] == [500]


async def test_a_stream_of_events_is_published_every_few_milliseconds() -> None:
    async with following("a") as scene:
        scene.published.clear()
        for number in range(1000):
            scene.write("a", str(number))
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert scene.published[-1] == {("default", "a"): "999"}
        assert 50 < len(scene.published) <= 210
        assert scene.counted("events_total", "MODIFIED") == 1000
        assert scene.counted("changes_total") == len(scene.published) + 1


async def test_a_single_event_is_published_at_once() -> None:
    async with following("a") as scene:
        scene.write("a", "2")
        loop = asyncio.get_running_loop()
        began = loop.time()
        scene.pulse.clear()
        await scene.pulse.wait()
        assert loop.time() == began


async def test_a_change_of_an_unread_field_is_not_published() -> None:
    async with following("a") as scene:
        scene.published.clear()
        changed = dict(scene.server.read("configmaps", "a"))
        for number in range(10):
            scene.server.write({**changed, "immutable": bool(number % 2)})
        await asyncio.sleep(1)
        assert scene.counted("events_total", "MODIFIED") == 10
        assert scene.published == []


async def test_a_quiet_selection_costs_three_requests_a_minute() -> None:
    """They are watches of 18 to 24 seconds, and a list about every ten minutes."""
    async with following("a") as scene:
        await asyncio.sleep(3600)
        assert 3600 / 24 <= scene.asked("watch") <= 3600 / 18 + 8
        assert 5 <= scene.asked("list") <= 8
        assert scene.reflector.problem() is None
        assert scene.counted("silent_seconds", "app=x") <= 25
        assert scene.counted("watches_total") == scene.asked("watch")
        assert scene.counted("lists_total") == scene.asked("list")


async def test_no_event_is_lost_or_doubled_between_two_watches() -> None:
    async with following() as scene:
        for number in range(2000):
            scene.write(f"n{number % 50}", str(number))
            await asyncio.sleep(0.1)
        await scene.equal()
        assert scene.asked("watch") > 8
        events = [scene.counted("events_total", kind) for kind in ("ADDED", "MODIFIED")]
        assert events == [50, 1950]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ADDED","object":{}}\n',
        b'{"type":"MODIFIED","object":{"metadata":null}}\n',
        b'{"type":"DELETED","object":[1,2]}\n',
        b'{"type":"BOOKMARK","object":{"metadata":{}}}\n',
        b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"2000"}}}\n',
        b'{"type":"RENAMED","object":{"metadata":{"name":"a","resourceVersion":"2000"}}}\n',
        b"\n\n",
    ],
)
async def test_a_nonsensical_event_is_harmless(line: bytes) -> None:
    async with following("a") as scene:
        scene.server.watches.inject([line])
        await asyncio.sleep(1)
        assert scene.shown == {"a": "1"}
        assert scene.asked("watch") == 1
        scene.write("a", "2")
        await scene.equal()


async def test_an_unreadable_event_causes_a_list_soon() -> None:
    async with following("a") as scene:
        for _ in range(100):
            scene.server.watches.inject([b'{"type":"DELETED","object":{"metadata":null}}\n'])
            await asyncio.sleep(0.1)
        await asyncio.sleep(50)
        assert scene.asked("list") == 2


@pytest.mark.parametrize(
    "line", [b"garbage\n", b'{"type":"ADD', b'{"type":3,"object":{}}\n', b"\xff\n"]
)
async def test_a_malformed_line_breaks_only_the_watch(line: bytes) -> None:
    async with following("a") as scene:
        scene.server.watches.inject([line])
        scene.write("b")
        await scene.equal(seconds=2)
        assert scene.asked("list") == 1


async def test_a_server_that_sends_garbage_is_asked_with_growing_delays() -> None:
    async with following("a") as scene:
        before = scene.asked()
        for second in range(300):
            scene.server.watches.inject([b"garbage\n"])
            if second % 50 == 0:
                scene.write("a", str(second))
            await asyncio.sleep(1)
        assert scene.asked() - before < 150
        await scene.equal(seconds=40)
        assert scene.reflector.problem() is not None


async def test_an_outage_and_its_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="picker.k8s.reflector"):
        async with following("a") as scene:
            scene.api.go_away()
            await asyncio.sleep(60)
            scene.api.come_back()
            await asyncio.sleep(10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
