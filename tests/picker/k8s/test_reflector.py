"""A reflector in virtual time: changes, contact with the API server, and faults of the server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from picker.k8s.api import (
    PODS,
    POOLS,
    ApiError,
    Selection,
    SilentError,
    UnreachableError,
    WatchEvent,
)
from picker.k8s.reflector import Contact
from tests.depth import worlds
from tests.fakes.kube_api import statuses
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.faults import Fault
from tests.fakes.kube_api.resources import Resource
from tests.support.kube.reflector_scene import Scene, following

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


@pytest.fixture
def contact() -> Contact:
    return Contact(PODS, Selection("models"))


def test_a_new_contact_has_no_problem(contact: Contact) -> None:
    assert contact.problem(5) is None
    assert contact.silent_seconds(5) is None


def test_a_failure_and_its_end_are_reported_once(contact: Contact) -> None:
    assert contact.failed(10, UnreachableError("refused"))
    assert not contact.failed(20, UnreachableError("reset"))
    assert contact.failed(30, ApiError(500, "InternalError", "oops"))
    assert "(for 25 s; the last known state is in use)" in (contact.problem(35) or "")
    assert contact.answered(40)
    assert contact.problem(40) is None
    assert not contact.answered(41)
    assert contact.silent_seconds(50) == 9


def test_after_silence_only_a_received_event_is_proof(contact: Contact) -> None:
    contact.failed(10, SilentError("nothing came"))
    assert not contact.answered(11)
    contact.failed(12, UnreachableError("reset"))
    assert not contact.answered(13)
    assert "nothing came" in (contact.problem(14) or "")
    assert contact.silent_seconds(14) is None
    assert contact.received(15)
    assert contact.problem(15) is None


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (401, "rejects the credentials; renew them"),
        (403, "grant the verbs list and watch on inferencepools"),
        (404, "install its CustomResourceDefinition"),
        (429, "the API server refuses: 429 Why: words"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, wanted: str) -> None:
    contact = Contact(POOLS, Selection("models"))
    contact.failed(0, ApiError(status, "Why", "words"))
    problem = contact.problem(1) or ""
    assert wanted in problem
    assert problem.startswith("inferencepools.inference.networking.k8s.io in namespace 'models': ")


SELECTED_RULE = Rule(("",), ("configmaps",), ("list", "watch"), namespace="default")


async def test_a_version_that_is_too_old_is_listed_again() -> None:
    async with following("a", "b") as scene:
        scene.server.watches.expire("configmaps")
        scene.write("a", "2")
        scene.erase("b")
        scene.write("c")
        await scene.equal()
        assert scene.asked("list") == 2
        assert scene.reflector.problem() is None
        assert scene.counted("errors_total", "410") == 1


async def test_a_window_that_is_always_too_short_causes_no_flood() -> None:
    async with following("a") as scene:
        scene.server.faults.answer(statuses.expired(1, 2), "watch")
        scene.server.watches.end()
        for number in range(60):
            scene.write("a", str(number))
            await asyncio.sleep(1)
        assert scene.asked("list") <= 25
        await scene.equal(seconds=6)


async def test_an_outage_of_ten_minutes_leaves_the_view_unchanged() -> None:
    async with following("a", "b") as scene:
        scene.api.go_away()
        await asyncio.sleep(1)
        before = scene.asked()
        for _ in range(600):
            await asyncio.sleep(1)
            assert scene.shown == {"a": "1", "b": "1"}
            assert "connection refused" in (scene.reflector.problem() or "")
        assert scene.asked() - before <= 240
        assert scene.counted("silent_seconds", "app=x") >= 600
        scene.write("c")
        scene.erase("a")
        scene.api.come_back(forget_changes=True)
        assert await scene.equal(seconds=6) <= 6
        assert scene.reflector.problem() is None


async def test_a_short_outage_needs_no_list() -> None:
    async with following("a") as scene:
        scene.api.go_away()
        scene.write("a", "2")
        await asyncio.sleep(5)
        scene.api.come_back()
        await scene.equal(seconds=6)
        assert scene.asked("list") == 1


async def test_a_silent_path_is_noticed_within_half_a_minute() -> None:
    async with following("a") as scene:
        scene.server.watches.silence()
        scene.write("a", "2")
        noticed = await scene.until(lambda: scene.reflector.problem() is not None, seconds=30)
        assert noticed <= 30
        assert scene.counted("errors_total", "silent") == 1
        await scene.equal(seconds=2)
        for second in range(120):
            scene.write("a", str(second))
            await asyncio.sleep(1)
            assert scene.reflector.problem() is not None
        assert scene.asked() <= 16
        await scene.equal(seconds=30)
        scene.server.watches.speak()
        await scene.until(lambda: scene.reflector.problem() is None, seconds=30)


async def test_a_server_that_never_answers_is_noticed_too() -> None:
    async with following("a") as scene:
        scene.server.faults.add(Fault(hangs=True))
        scene.server.watches.end(abruptly=True)
        await scene.until(lambda: scene.reflector.problem() is not None, seconds=30)
        before = scene.asked()
        await asyncio.sleep(600)
        assert scene.asked() - before <= 24
        scene.server.faults.lift()
        scene.write("a", "2")
        await scene.equal(seconds=6)


async def test_a_server_that_asks_for_patience_gets_it() -> None:
    async with following("a") as scene:
        scene.server.faults.answer(statuses.too_many_requests("busy", 20), "watch", "list")
        scene.server.watches.fail(statuses.too_many_requests("busy", 20))
        await asyncio.sleep(1)
        before = scene.asked()
        await asyncio.sleep(18)
        assert scene.asked() == before
        await asyncio.sleep(102)
        assert scene.asked() - before <= 6
        assert "busy" in (scene.reflector.problem() or "")
        scene.server.faults.lift()
        scene.write("a", "2")
        await scene.equal(seconds=26)


async def test_watches_that_end_at_once_cause_no_flood() -> None:
    async with following("a") as scene:
        before = scene.asked()
        for number in range(1200):
            scene.server.watches.end(abruptly=bool(number % 2))
            if number % 100 == 0:
                scene.write("a", str(number))
            await asyncio.sleep(0.05)
        assert scene.asked() - before <= 30
        await scene.equal(seconds=6)


async def test_lost_permissions_are_logged_with_the_rule_to_grant() -> None:
    async with following("a", token="secret", first_seconds=0) as scene:
        scene.server.access.grant("secret", "picker", [SELECTED_RULE])
        await scene.until(lambda: scene.reflector.synced, seconds=20)
        await asyncio.sleep(5)
        scene.server.access.grant("secret", "picker", [])
        await scene.until(lambda: scene.reflector.problem() is not None, seconds=30)
        problem = scene.reflector.problem() or ""
        assert "grant the verbs list and watch on configmaps" in problem
        assert "namespace 'default'" in problem
        before = scene.asked()
        await asyncio.sleep(600)
        assert scene.asked() - before <= 55
        assert scene.shown == {"a": "1"}
        scene.write("a", "2")
        scene.server.access.grant("secret", "picker", [SELECTED_RULE])
        await scene.equal(seconds=20)
        assert scene.reflector.problem() is None


def _missing(scene: Scene) -> list[Resource]:
    return scene.server.catalogue.remove("configmaps")


async def test_a_kind_that_is_not_installed_has_no_objects() -> None:
    async with following(first_seconds=0) as scene:
        (resource,) = _missing(scene)
        await asyncio.sleep(1)
        assert scene.reflector.synced
        assert not scene.reflector.installed
        assert scene.published == [{}]
        assert "install its CustomResourceDefinition" in (scene.reflector.problem() or "")
        before = scene.asked()
        await asyncio.sleep(600)
        assert scene.asked() - before <= 55
        scene.server.catalogue.serve(resource)
        scene.write("a")
        await scene.equal(seconds=16)
        assert scene.reflector.installed
        assert scene.reflector.problem() is None


async def test_a_removed_kind_loses_its_objects_after_a_minute() -> None:
    """The delay covers a starting server that does not know all of its kinds yet."""
    async with following("a") as scene:
        (resource,) = _missing(scene)
        scene.server.watches.end()
        await asyncio.sleep(40)
        assert scene.shown == {"a": "1"}
        assert not scene.reflector.installed
        await scene.until(lambda: scene.shown == {}, seconds=60)
        scene.server.catalogue.serve(resource)
        await scene.equal(seconds=16)
        assert scene.shown == {"a": "1"}


async def test_a_version_of_the_future_is_noticed_by_the_list_that_is_due() -> None:
    """After a restored backup watches are silent about it, so the regular list finds it."""
    async with following("a") as scene:
        for number in range(100):
            scene.write("a", str(number))
        await scene.equal()
        scene.server.store.rewind(1001)
        scene.server.watches.end()
        scene.write("a", "after")
        await asyncio.sleep(60)
        assert scene.shown == {"a": "99"}
        await scene.equal(seconds=660)


async def test_a_version_of_the_future_after_an_outage_is_noticed_at_once() -> None:
    """A restored backup makes the server's versions older than the reflector's."""
    async with following("a") as scene:
        for number in range(100):
            scene.write("a", str(number))
        await scene.equal()
        scene.api.go_away()
        scene.server.store.rewind(1001)
        scene.write("a", "after")
        await asyncio.sleep(60)
        scene.api.come_back()
        await scene.equal(seconds=6)


async def test_a_bookmark_that_goes_back_is_a_backup_too() -> None:
    async with following("a") as scene:
        body = {"kind": "ConfigMap", "metadata": {"resourceVersion": "7"}}
        scene.server.watches.inject_object("BOOKMARK", body)
        await asyncio.sleep(1)
        assert scene.asked("list") == 2


async def test_the_next_watch_begins_at_the_last_bookmark() -> None:
    async with following("a", window=5) as scene:
        for number in range(20):
            scene.write("other", str(number), app="y")
        version = str(scene.server.store.version)
        scene.server.watches.inject_object("BOOKMARK", {"metadata": {"resourceVersion": version}})
        await asyncio.sleep(60)
        assert scene.asked("list") == 1
        scene.write("a", "2")
        await scene.equal()


async def test_a_list_that_fails_when_it_is_due_does_not_stop_the_watch() -> None:
    async with following("a") as scene:
        scene.server.faults.answer(statuses.internal(), "list")
        await asyncio.sleep(1500)
        scene.write("a", "2")
        await scene.equal(seconds=3)
        assert scene.asked("list") <= 20


async def _written(scene: Scene, rng: Random) -> None:
    name = f"n{rng.randrange(12)}"
    stored = scene.server.store.all(_configs(scene))
    if rng.random() < 0.3 and any(one.obj["metadata"]["name"] == name for one in stored):
        scene.erase(name)
    else:
        scene.write(name, str(rng.random()), app=rng.choice("xxxy"))


async def _ended(scene: Scene, rng: Random) -> None:
    scene.server.watches.end(abruptly=rng.random() < 0.5)


async def _expired(scene: Scene, _: Random) -> None:
    scene.server.watches.expire("configmaps")


async def _forgotten(scene: Scene, _: Random) -> None:
    scene.server.store.compact()


async def _gone(scene: Scene, rng: Random) -> None:
    scene.api.go_away()
    await asyncio.sleep(rng.choice([0.5, 8, 90]))
    scene.api.come_back(forget_changes=rng.random() < 0.5)


async def _refused(scene: Scene, rng: Random) -> None:
    errors = [statuses.internal(), statuses.initializing(), statuses.expired(1, 2)]
    scene.server.faults.answer(rng.choice(errors), times=rng.randrange(1, 4))


async def _garbled(scene: Scene, rng: Random) -> None:
    lines = [b"garbage\n", b'{"type":"A', b'{"type":"X"}\n', b'{"type":"ADDED","object":{}}\n']
    scene.server.watches.inject([rng.choice(lines)])


async def _silenced(scene: Scene, rng: Random) -> None:
    scene.server.watches.silence()
    await asyncio.sleep(rng.choice([1, 40]))
    scene.server.watches.speak()


async def _late(scene: Scene, rng: Random) -> None:
    scene.server.faults.delay(rng.choice([0.5, 5]))
    await asyncio.sleep(rng.choice([1, 20]))
    scene.server.faults.lift()


_FAULTS = (_ended, _expired, _forgotten, _gone, _refused, _garbled, _silenced, _late)


def _configs(scene: Scene) -> Resource:
    return scene.server.resource("configmaps")


@pytest.mark.parametrize("seed", range(worlds(40)))
async def test_the_view_ends_up_right_after_any_faults(seed: int) -> None:
    rng = Random(seed)
    loop = asyncio.get_running_loop()
    async with following("n1", "n2", window=20, seed=seed) as scene:
        began = loop.time()
        for _ in range(80):
            await (_written if rng.random() < 0.5 else rng.choice(_FAULTS))(scene, rng)
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.1, 3]))
        scene.server.faults.lift()
        await scene.equal(seconds=35)
        minutes = (loop.time() - began) / 60
        assert scene.asked() <= 30 + 45 * minutes
        await asyncio.sleep(1)
        assert scene.published[-1] is scene.reflector.view
        await scene.until(lambda: scene.reflector.problem() is None, seconds=60)
        scene.server.store.check_integrity()


# A gateway in front of the API server answers in its place


async def test_periodic_lists_make_up_for_silent_watches() -> None:
    """A proxy accepts the watches and closes them at once."""

    @asynccontextmanager
    async def barren(*_: object) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async def nothing() -> AsyncIterator[WatchEvent]:
            for event in ():
                yield event

        yield nothing()

    async with following("a") as scene:
        scene.api.watch = barren  # type: ignore[assignment, method-assign]
        scene.server.watches.end()
        await asyncio.sleep(60)
        for number in range(10):
            scene.write("a", str(number))
            await scene.equal(seconds=25)
        before = scene.asked("list")
        await asyncio.sleep(600)
        assert scene.asked("list") - before <= 80


async def test_a_proxy_that_answers_404_removes_nothing() -> None:
    """A kind is missing only if discovery lists other kinds without it."""

    async def none(_: object) -> bool:
        return False

    async with following("a") as scene:
        has = scene.api.has
        scene.api.has = none  # type: ignore[method-assign]
        resources = scene.server.catalogue.remove("configmaps")
        scene.server.watches.end()
        await asyncio.sleep(600)
        assert scene.shown == {"a": "1"}
        assert scene.reflector.installed
        assert "404" in (scene.reflector.problem() or "")
        for resource in resources:
            scene.server.catalogue.serve(resource)
        scene.api.has = has  # type: ignore[method-assign]
        scene.write("a", "2")
        await scene.equal(seconds=16)
