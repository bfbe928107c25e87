"""The free queue: empty before cached, oldest before newer, no tenant below its share."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.engine.cache.free_queue import MAX_TENANTS, FreeQueue
from worker.errors import IntegrityError


def fill(queue: FreeQueue, tenant: str, num_blocks: int) -> list[int]:
    blocks = [queue.take(tenant) for _ in range(num_blocks)]
    for block in blocks:
        queue.put_cached(block)
    return blocks


def test_empty_blocks_go_first_and_the_last_emptied_before_the_others() -> None:
    queue = FreeQueue(4, fair=True)
    assert [queue.take("") for _ in range(4)] == [0, 1, 2, 3]
    queue.put_cached(3)
    queue.put_empty(1)
    queue.put_empty(0)
    assert list(queue) == [0, 1, 3]
    assert [queue.take("") for _ in range(3)] == [0, 1, 3]
    assert len(queue) == 0


def test_cached_blocks_go_in_the_order_of_their_last_use() -> None:
    queue = FreeQueue(4, fair=True)
    fill(queue, "", 4)
    queue.touch(0)
    queue.remove(1)
    queue.put_cached(1)
    assert [queue.take("") for _ in range(4)] == [2, 3, 0, 1]


def test_a_tenant_within_its_share_loses_nothing_to_a_flood() -> None:
    queue = FreeQueue(6, fair=True)
    quiet = fill(queue, "quiet", 3)
    fill(queue, "flood", 3)
    for _ in range(20):
        block = queue.take("flood")
        assert block not in quiet
        queue.put_cached(block)


def test_a_newcomer_gets_its_share_from_those_above_theirs() -> None:
    queue = FreeQueue(9, fair=True)
    small = fill(queue, "small", 2)
    large = fill(queue, "large", 7)
    assert [queue.take("new") for _ in range(3)] == large[:3]
    assert [queue._accounts[t].num_blocks for t in ("small", "large", "new")] == [2, 4, 3]
    assert [queue.take("new") for _ in range(2)] == [large[3], small[0]]


def test_fairness_reserves_nothing() -> None:
    queue = FreeQueue(4, fair=True)
    quiet = fill(queue, "quiet", 2)
    held = [queue.take("busy") for _ in range(4)]
    assert held[2:] == quiet


def test_tenants_beyond_the_limit_share_an_account() -> None:
    queue = FreeQueue(2 * MAX_TENANTS, fair=True)
    for number in range(2 * MAX_TENANTS):
        fill(queue, f"t{number}", 1)
    queue.check_integrity(set(range(2 * MAX_TENANTS)), set())
    assert queue._accounts["t0"].num_blocks == 1
    assert f"t{MAX_TENANTS}" not in queue._accounts
    assert queue.take("new") == MAX_TENANTS  # the crowd is far above one share


def test_an_account_that_does_not_add_up_is_noticed() -> None:
    queue = FreeQueue(4, fair=True)
    fill(queue, "a", 2)
    with pytest.raises(IntegrityError):
        queue.check_integrity({0}, set())


@examples(100)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=60), st.booleans())
def test_eviction_follows_the_rule(script: list[tuple[str, int]], fair: bool) -> None:
    num_blocks = 9
    queue = FreeQueue(num_blocks, fair)
    owners: dict[int, str] = {}
    idle: OrderedDict[int, None] = OrderedDict()  # oldest first, over all tenants
    held: list[int] = []
    for tenant, release in script:
        if len(queue) and release < 4:
            was_cached = len(owners) == num_blocks
            block = queue.take(tenant)
            if was_cached:
                counts = Counter(owners.values())
                counts[tenant] += 1
                above = [b for b in idle if counts[owners[b]] * len(counts) > num_blocks]
                assert block == next(iter(above if fair and above else idle))
                del idle[block]
            owners[block] = tenant
            held.append(block)
        elif held:
            block = held.pop(0)
            queue.put_cached(block)
            idle[block] = None
        queue.check_integrity(set(owners), set(held))
