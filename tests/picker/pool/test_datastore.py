"""The datastore stores the pool, returns immutable snapshots, and notifies listeners."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.pool.datastore import Datastore, EndpointChanges, Snapshot
from picker.scrape.sources import PageLocation
from picker.types import Endpoint, EndpointMetrics
from tests.depth import examples
from tests.support.picker.scrape_scene import PAGE, Pages, scraping, source


@dataclass
class Forgetful:
    forgotten: list[str] = field(default_factory=list)

    def endpoint_removed(self, key: str) -> None:
        self.forgotten.append(key)


def endpoint(name: str, port: int = 8000, **labels: str) -> Endpoint:
    return Endpoint(name, "10.0.0.1", port, labels=labels)


@pytest.fixture
def observer() -> Forgetful:
    return Forgetful()


@pytest.fixture
def store(observer: Forgetful) -> Datastore:
    """Return a pool of the endpoint `a`."""
    store = Datastore([observer])
    store.set_endpoints([endpoint("a")])
    return store


def test_a_snapshot_never_changes_and_is_shared_until_something_does(store: Datastore) -> None:
    before = store.snapshot()
    assert store.snapshot() is before
    store.update_metrics("default/a", EndpointMetrics(waiting_requests=4))
    after = store.snapshot()
    assert before.candidates[0].metrics is None
    assert after.candidates[0].metrics == EndpointMetrics(waiting_requests=4)
    assert after.version > before.version


def test_setting_endpoints_reports_what_came_and_went() -> None:
    observer = Forgetful()
    store = Datastore([observer])
    received: list[EndpointChanges] = []
    store.subscribe(received.append)
    assert not store.synced
    store.set_endpoints([endpoint("b"), endpoint("a")])
    store.set_endpoints([endpoint("a"), endpoint("b")])
    changes = store.set_endpoints([endpoint("c"), endpoint("a")])
    assert store.synced
    assert [e.name for e in changes.added] == ["c"]
    assert [e.name for e in changes.removed] == ["b"]
    assert [c.endpoint.name for c in store.snapshot().candidates] == ["a", "c"]
    assert observer.forgotten == ["default/b"]
    assert len(received) == 2


def test_new_labels_keep_the_metrics_but_a_new_address_does_not(
    store: Datastore, observer: Forgetful
) -> None:
    """Another address is another server."""
    store.update_metrics("default/a", EndpointMetrics(running_requests=2))
    assert not store.set_endpoints([endpoint("a", role="decode")])
    candidate = store.get("default/a")
    assert candidate.metrics is not None
    assert candidate.endpoint.labels == {"role": "decode"}
    assert observer.forgotten == []
    changes = store.set_endpoints([endpoint("a", port=9000)])
    assert (len(changes.added), len(changes.removed)) == (1, 1)
    moved = store.get("default/a")
    assert moved.metrics is None
    assert observer.forgotten == ["default/a"]


def test_a_restart_is_noticed_even_across_failed_scrapes(
    store: Datastore, observer: Forgetful
) -> None:
    """A new process has an empty cache."""
    store.update_metrics("default/a", EndpointMetrics(process_start_time_seconds=100.0))
    store.update_metrics("default/a", EndpointMetrics(process_start_time_seconds=100.0))
    store.update_metrics("default/a", EndpointMetrics(process_start_time_seconds=None))
    assert observer.forgotten == []
    store.mark_stale("default/a")
    received: list[EndpointChanges] = []
    store.subscribe(received.append)
    store.update_metrics("default/a", EndpointMetrics(process_start_time_seconds=200.0))
    assert observer.forgotten == ["default/a"]
    assert received == [EndpointChanges(restarted=("default/a",))]


def test_news_of_endpoints_that_left_are_ignored() -> None:
    """A scrape may end after its endpoint."""
    store = Datastore()
    store.update_metrics("default/ghost", EndpointMetrics())
    store.mark_stale("default/ghost")
    assert store.snapshot().candidates == ()
    assert store.get("default/ghost") is None


def test_the_last_metrics_outlive_the_current_ones(store: Datastore) -> None:
    store.update_metrics("default/a", EndpointMetrics(waiting_requests=4))
    store.mark_stale("default/a")
    (candidate,) = store.snapshot().candidates
    assert candidate.metrics is None
    assert candidate.last_metrics == EndpointMetrics(waiting_requests=4)


def test_attributes_are_added_replaced_and_dropped_by_name(store: Datastore) -> None:
    store.set_attributes("default/a", {"x/p": 1, "y/p": 2})
    store.update_metrics("default/a", EndpointMetrics(), {"x/p": 3})
    before = store.snapshot()
    store.set_attributes("default/a", {"y/p": 2})
    assert store.snapshot() is before
    store.drop_attributes("default/a", ["x/p", "unknown"])
    assert before.candidates[0].attributes == {"x/p": 3, "y/p": 2}
    assert store.snapshot().candidates[0].attributes == {"y/p": 2}
    after = store.snapshot()
    store.drop_attributes("default/a", ["x/p"])
    store.set_attributes("default/ghost", {"x/p": 1})
    store.drop_attributes("default/ghost", ["x/p"])
    assert store.snapshot() is after


def test_attributes_that_follow_from_an_endpoint_are_there_from_the_start() -> None:
    store = Datastore([], [lambda one: {"Role/d": one.labels.get("role", "")}])
    store.set_endpoints([endpoint("a", role="decode")])
    store.set_attributes("default/a", {"x/p": 1})
    assert store.snapshot().candidates[0].attributes == {"Role/d": "decode", "x/p": 1}
    store.set_endpoints([endpoint("a", role="prefill")])
    assert store.snapshot().candidates[0].attributes == {"Role/d": "prefill", "x/p": 1}
    observer = Forgetful()
    store.use([observer], [lambda one: {"Name/d": one.name}])
    assert store.snapshot().candidates[0].attributes == {"Name/d": "a", "x/p": 1}
    store.set_endpoints([])
    assert observer.forgotten == ["default/a"]


def test_listeners_hear_of_updates_until_they_do_not_listen() -> None:
    store = Datastore()
    received: list[EndpointChanges] = []
    store.subscribe(received.append)
    store.set_endpoints([endpoint("a")])
    moved = Endpoint("a", "10.0.0.1", 8000, metrics_host_port="10.0.0.9:1")
    assert not store.set_endpoints([moved])
    assert [change.updated for change in received] == [(), (moved,)]
    store.unsubscribe(received.append)
    store.set_endpoints([])
    assert len(received) == 2


def test_another_incarnation_at_the_same_address_is_another_server() -> None:
    """Observers forget it in one step in which the endpoint is never missing."""
    observer = Forgetful()
    store = Datastore([observer])
    store.set_endpoints([Endpoint("a", "10.0.0.1", 8000, incarnation="1")])
    store.update_metrics("default/a", EndpointMetrics())
    changes = store.set_endpoints([Endpoint("a", "10.0.0.1", 8000, incarnation="2")])
    assert (len(changes.added), len(changes.removed)) == (1, 1)
    assert store.snapshot().candidates[0].last_metrics is None
    assert observer.forgotten == ["default/a"]


def test_a_pool_that_is_gone_is_as_good_as_never_known(
    store: Datastore, observer: Forgetful
) -> None:
    store.forget_pool()
    assert store.snapshot().candidates == ()
    assert not store.synced
    assert observer.forgotten == ["default/a"]
    store.set_endpoints([])
    assert store.synced


def test_an_endpoint_answers_while_scrapes_find_something() -> None:
    store = Datastore(describers=[lambda endpoint: {"Zone/labels": endpoint.name}])
    store.set_endpoints([Endpoint("a", "10.0.0.1", 1)])

    def answers() -> bool:
        [one] = store.snapshot().candidates
        return store.is_answering(one)

    assert not answers()
    store.set_attributes("default/a", {"Models/source": ("m",)})
    assert answers()
    store.drop_attributes("default/a", ["Models/source"])
    assert not answers()
    store.update_metrics("default/a", EndpointMetrics())
    assert answers()
    store.mark_stale("default/a")
    assert not answers()


ENDPOINTS = st.builds(
    Endpoint,
    name=st.sampled_from("abcd"),
    address=st.just("10.0.0.1"),
    port=st.integers(1, 4),
    labels=st.sampled_from([{}, {"role": "decode"}]),
    incarnation=st.sampled_from(["", "again"]),
)
POOLS = st.lists(ENDPOINTS, max_size=4).map(lambda pool: {one.key: one for one in pool})


class Notified:
    def __init__(self) -> None:
        self.store = Datastore((self,))
        self.changes: list[tuple[frozenset[str], ...]] = []
        self.removed: list[str] = []
        self.store.subscribe(self.note)

    def note(self, changes: EndpointChanges) -> None:
        parts = (changes.added, changes.removed, changes.updated)
        self.changes.append(tuple(frozenset(one.key for one in part) for part in parts))

    def endpoint_removed(self, key: str) -> None:
        self.removed.append(key)

    @property
    def known(self) -> dict[str, object]:
        return {one.key: one for one in self.store.snapshot().candidates}


@examples(200)
@given(st.lists(POOLS, max_size=8))
def test_changes_come_to_the_same_as_the_whole_pool(pools: list[dict[str, Endpoint]]) -> None:
    whole, changed = Notified(), Notified()
    snapshots: list[tuple[Snapshot, list[object]]] = []
    before: dict[str, Endpoint] = {}
    for pool in pools:
        whole.store.set_endpoints(pool.values())
        present = [one for one in pool.values() if before.get(one.key) != one]
        changed.store.change_endpoints(present, before.keys() - pool.keys())
        for key in pool:
            for notified in (whole, changed):
                notified.store.update_metrics(key, EndpointMetrics(waiting_requests=len(snapshots)))
        assert changed.known == whole.known
        assert changed.changes == whole.changes
        assert sorted(changed.removed) == sorted(whole.removed)
        assert changed.store.size == len(pool)
        snapshot = changed.store.snapshot()
        snapshots.append((snapshot, list(snapshot.candidates)))
        before = pool
    assert all(list(snapshot.candidates) == then for snapshot, then in snapshots)


@pytest.mark.looptime
@examples(40)
@given(pools=st.lists(POOLS, min_size=1, max_size=6))
async def test_look_ups_follow_the_changes(pools: list[dict[str, Endpoint]]) -> None:
    pages = Pages(dict.fromkeys(range(1, 6), PAGE))
    everywhere = source(pages, location=PageLocation(port=5))
    async with scraping(source(pages), everywhere) as scene:
        for pool in pools:
            scene.store.set_endpoints(pool.values())
            await asyncio.sleep(0.03)
        await asyncio.sleep(0.2)
        asked = pages.asked.copy()
        await asyncio.sleep(0.2)
        wanted = {one.port for one in pools[-1].values()} | ({5} if pools[-1] else set())
        assert {port for port in pages.asked if pages.asked[port] > asked[port]} == wanted
        assert all(one.metrics is not None for one in scene.store.snapshot().candidates)
