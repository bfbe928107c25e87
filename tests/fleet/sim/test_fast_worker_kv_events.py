"""The approximate worker publishes the cache events that a picker's precise index needs."""

from collections.abc import Sequence

from fleet.sim.fast_worker import BlockCache, chain
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheEvent

SIZE = 4


def test_subscribers_receive_stored_and_evicted_blocks() -> None:
    """Chains have their parents, and evicted blocks were stored; ends are evicted before
    beginnings.
    """
    published: list[CacheEvent] = []

    def publish(events: Sequence[CacheEvent]) -> None:
        published.extend(events)

    cache, tokens = BlockCache(publish), list(range(12))
    names = chain(tokens, SIZE, [], 3)
    cache.stored(tokens, names[:2], 0, SIZE)
    cache.stored(tokens, names, 2, SIZE)
    cache.add_free(names)
    cache.evict(1)
    cache.flush()
    first, second, *removed = published
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert first.parent is None
    assert second.parent == first.blocks[-1].digest
    assert [one.token_ids for one in (*first.blocks, *second.blocks)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
    ]
    stored = [one.digest for one in (*first.blocks, *second.blocks)]
    assert removed == [BlockRemoved(stored[2]), BlockRemoved(stored[1])]
    assert cache.match(names, 3) == 1
