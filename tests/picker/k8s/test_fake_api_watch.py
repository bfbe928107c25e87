"""Watches of the fake API server: no gap, no repetition, the window and its end, bookmarks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_api.clock import ManualClock
from kube_api.cluster import Cluster, open_cluster
from kube_api.kubelet import Kubelet
from kube_api.resources import BUILT_IN
from kube_api.selectors import parse_selector
from kube_api.statuses import ApiError
from kube_api.store import Store, key_of
from kube_api.watch import Feed, WatchRequest, WatchSettings

CONFIGS = next(resource for resource in BUILT_IN if resource.plural == "configmaps")
WHOLE_WINDOW = 20


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The API server to ask."""
    async with open_cluster() as opened:
        yield opened


def config(name: str, app: str = "x", **data: str) -> dict[str, Any]:
    """A ConfigMap with one label."""
    metadata = {"name": name, "namespace": "default", "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def applied(objects: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has after these events. An event that does not follow from them fails."""
    for event in events:
        name = event["object"]["metadata"]["name"]
        assert (event["type"] == "ADDED") is (name not in objects)
        if event["type"] == "DELETED":
            del objects[name]
        else:
            objects[name] = event["object"]
    return objects


def taken(feed: Feed) -> list[dict[str, Any]]:
    """The events that a feed has now."""
    return [json.loads(line) for line in feed.take().splitlines()]


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete"]),
        st.sampled_from("abc"),
        st.sampled_from("xy"),
        st.integers(0, 2),
    ),
    max_size=40,
)


def written(store: Store, write: tuple[str, str, str, int]) -> None:
    """One write; deleting what is not there does nothing."""
    how, name, app, value = write
    obj = config(name, app, value=str(value))
    found = store.find(CONFIGS, key_of(obj))
    if how == "delete":
        if found is not None:
            store.delete(CONFIGS, key_of(obj))
    elif found is None:
        store.insert(CONFIGS, obj)
    else:
        store.replace(CONFIGS, obj)


@settings(max_examples=60, deadline=None)
@given(WRITES, WRITES, st.data())
def test_list_and_watch_lead_to_the_same_objects(
    before: list[Any], after: list[Any], data: st.DataObject
) -> None:
    """From every version that was listed, whether the watch begins at once or late."""
    store = Store(window=WHOLE_WINDOW)
    selector = parse_selector(CONFIGS, "default", "app=x", "")
    for write in before:
        written(store, write)
    listed = {o.obj["metadata"]["name"]: o.obj for o in store.all(CONFIGS) if selector(o.obj)}
    request = WatchRequest(CONFIGS, selector, store.version)
    late = data.draw(st.integers(0, len(after)))
    for write in after[:late]:
        written(store, write)
    feed = Feed(request, store, WatchSettings())
    feed.start()
    for write in after[late:]:
        written(store, write)
    store.check_integrity()
    events = taken(feed)
    if events and events[-1]["type"] == "ERROR":
        assert events[-1]["object"]["code"] == 410
        assert late > WHOLE_WINDOW
        return
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    now = {o.obj["metadata"]["name"]: o.obj for o in store.all(CONFIGS) if selector(o.obj)}
    assert applied(listed, events) == now


def test_the_window_keeps_so_many_changes_and_no_more() -> None:
    """One before the oldest change kept is replayed whole; one earlier is refused."""
    store = Store(window=3)
    store.insert(CONFIGS, config("a"))
    versions = [store.replace(CONFIGS, config("a", n=str(n))).version for n in range(5)]
    assert [one.version for one in store.since(CONFIGS, versions[1])] == versions[2:]
    with pytest.raises(ApiError, match="too old resource version") as refused:
        store.since(CONFIGS, versions[0])
    assert refused.value.code == 410


def test_a_write_of_the_same_state_is_no_change() -> None:
    """Neither a new version nor an event."""
    store = Store()
    first = store.insert(CONFIGS, config("a"))
    assert store.replace(CONFIGS, config("a")) == first
    assert len(store.since(CONFIGS, first.version - 1)) == 1


def test_a_watch_from_the_future_is_told_nothing_until_the_counter_is_past_it() -> None:
    """As after a restored backup: no error, no event, and then only what comes later."""
    store = Store()
    store.insert(CONFIGS, config("a"))
    request = WatchRequest(CONFIGS, parse_selector(CONFIGS, None, "", ""), store.version + 2)
    feed = Feed(request, store, WatchSettings())
    feed.start()
    for number in range(3):
        store.replace(CONFIGS, config("a", n=str(number)))
    assert [event["object"]["data"]["n"] for event in taken(feed)] == ["2"]


def test_a_watch_that_lags_too_far_is_ended() -> None:
    """The client resumes from what it has read."""
    store = Store()
    request = WatchRequest(CONFIGS, parse_selector(CONFIGS, None, "", ""))
    feed = Feed(request, store, WatchSettings(backlog=3))
    feed.start()
    for name in "abcde":
        store.insert(CONFIGS, config(name))
    assert [event["object"]["metadata"]["name"] for event in taken(feed)] == list("abcd")
    assert feed.over


async def test_writers_at_once_are_seen_in_one_order_without_gap(cluster: Cluster) -> None:
    """Several clients write while others watch from the same version: all see the same story."""
    path = cluster.path("configmaps")
    start = (await cluster.call("GET", path)).version
    chosen = {"resourceVersion": start, "labelSelector": "app=x"}
    watches = [asyncio.create_task(cluster.watch(path, events=40, **chosen)) for _ in range(3)]

    async def writer(name: str) -> None:
        await cluster.call("POST", path, config(name) | {"metadata": meta(name)})
        for number in range(8):
            await cluster.call("PATCH", f"{path}/{name}", {"data": {"n": str(number)}})
        await cluster.call("DELETE", f"{path}/{name}")

    await asyncio.gather(*(writer(name) for name in ("a", "b", "c", "d")))
    stories = [await watch for watch in watches]
    assert stories[0] == stories[1] == stories[2]
    assert applied({}, stories[0]) == {}
    versions = [int(one["object"]["metadata"]["resourceVersion"]) for one in stories[0]]
    assert versions == sorted(set(versions))


def meta(name: str) -> dict[str, Any]:
    """Metadata without a namespace: the address says it."""
    return {"name": name, "labels": {"app": "x"}}


async def test_a_bookmark_tells_a_quiet_watch_how_far_it_has_come() -> None:
    """Each minute, and only to those who ask; the version is the server's newest."""
    async with open_cluster() as cluster:
        if cluster.fake is None or cluster.clock is None:
            pytest.skip("a real server's minute is a minute")
        path = cluster.path("configmaps")
        start = (await cluster.call("GET", path)).version
        cluster.fake.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
        since = {"resourceVersion": start, "timeoutSeconds": "150"}
        asked = await cluster.watch(path, passing_seconds=150, allowWatchBookmarks="1", **since)
        assert [event["type"] for event in asked] == ["BOOKMARK", "BOOKMARK", "EOF"]
        version = asked[0]["object"]["metadata"]["resourceVersion"]
        assert int(version) == cluster.fake.store.version > int(start)
        assert await cluster.watch(path, passing_seconds=150, **since) == [{"type": "EOF"}]


async def test_bookmarks_of_a_server_without_progress_stay_behind_and_grow_too_old() -> None:
    """A quiet resource's bookmark is then refused with 410 after a restart."""
    async with open_cluster() as cluster:
        if cluster.fake is None or cluster.clock is None:
            pytest.skip("a property of one etcd's settings")
        fake = cluster.fake
        fake.watches.settings = WatchSettings(bookmarks_follow_head=False)
        path = cluster.path("configmaps")
        start = (await cluster.call("GET", path)).version
        fake.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
        told = await cluster.watch(
            path, events=1, passing_seconds=60, resourceVersion=start, allowWatchBookmarks="1"
        )
        stale = told[0]["object"]["metadata"]["resourceVersion"]
        assert stale == start
        await fake.go_away()
        await fake.come_back(forget_changes=True)
        again = await cluster.watch(path, resourceVersion=stale)
        assert [event["type"] for event in again] == ["ERROR", "EOF"]
        assert again[0]["object"]["reason"] == "Expired"


async def test_grace_ends_on_the_clock_of_the_server() -> None:
    """The kubelet of the fake ends a deleted Pod after its grace period, step by step."""
    async with open_cluster() as cluster:
        if cluster.fake is None or cluster.clock is None:
            pytest.skip("a real cluster has its own kubelet")
        clock: ManualClock = cluster.clock
        kubelet = Kubelet(cluster.fake)
        kubelet.run("a", "10.0.0.1", {"app": "x"}, grace_seconds=30)
        start = str(cluster.fake.store.version)
        kubelet.delete("a")
        dying = cluster.fake.read("pods", "a")
        assert dying["status"]["conditions"][0]["status"] == "True"
        clock.advance(29)
        assert cluster.fake.read("pods", "a") == dying
        clock.advance(1)
        events = await cluster.watch(cluster.path("pods"), events=4, resourceVersion=start)
        assert [event["type"] for event in events] == ["MODIFIED"] * 3 + ["DELETED"]
        graces = [e["object"]["metadata"]["deletionGracePeriodSeconds"] for e in events]
        assert graces == [30, 30, 0, 0]
        assert [e["object"]["status"]["phase"] for e in events] == ["Running"] + ["Succeeded"] * 3
