"""Single changes of endpoints, compared with setting the whole pool at every step."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.pool.datastore import Datastore, EndpointChanges, Snapshot
from picker.scrape.sources import PageLocation
from picker.types import Endpoint, EndpointMetrics
from tests.depth import examples
from tests.support.picker.scrape_scene import PAGE, Pages, scraping, source

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
