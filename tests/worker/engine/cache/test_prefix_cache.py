"""Names and contents: one digest stands for one lineage, beginnings are found, copies counted."""

import pytest

from worker.engine.cache.block_hash import BlockHash, PartialBlock
from worker.engine.cache.prefix_cache import MAX_CANDIDATES, PrefixCache
from worker.errors import IntegrityError

ROOT = b"root"
ONE = BlockHash(b"d", ROOT, (1, 1))
OTHER = BlockHash(b"d", ROOT, (2, 2))
CHILD = BlockHash(b"e", b"d", (3, 3))
GRANDCHILD = BlockHash(b"f", b"e", (4, 4))


def cache(num_blocks: int = 8) -> PrefixCache:
    return PrefixCache(num_blocks, partial=True, record=False)


def test_a_digest_keeps_its_content_while_anything_comes_after_it() -> None:
    """The colliding contents are refused even after the first block is gone: what is cached below
    it would be taken for theirs.
    """
    prefix = cache()
    assert prefix.store([0, 1, 2], [ONE, CHILD, GRANDCHILD], 0) == (3, [])
    assert prefix.drop(0)
    assert prefix.drop(1)
    prefix.check_integrity()
    assert prefix.store([3], [OTHER], 0) == (0, [])
    assert prefix.num_collisions == 1
    assert not prefix.holds(3)
    assert prefix.store([4], [ONE], 0) == (1, [])
    assert prefix.find_chain([ONE, CHILD]) == [4]
    assert prefix.drop(4)
    assert prefix.drop(2)
    assert prefix.store([3], [OTHER], 0) == (1, [])
    prefix.check_integrity()


def test_a_partial_block_keeps_its_parents_name_alive_too() -> None:
    prefix = cache()
    prefix.store([0], [ONE], 0)
    assert prefix.store_partial(1, PartialBlock(1, b"d", (3,)), 0) == (True, [])
    prefix.drop(0)
    assert prefix.store([2], [OTHER], 0) == (0, [])
    prefix.check_integrity()
    prefix.drop(1)
    assert prefix.store([2], [OTHER], 0) == (1, [])


def test_sealing_ends_before_a_collision() -> None:
    prefix = cache()
    prefix.store([0], [BlockHash(b"e", ROOT, (9, 9))], 0)
    assert prefix.store([1, 2, 3], [ONE, CHILD, GRANDCHILD], 0) == (1, [])
    assert prefix.find_chain([ONE, CHILD, GRANDCHILD]) == [1]
    prefix.check_integrity()


def test_an_orphan_is_found_again_when_its_parent_is_back() -> None:
    prefix = cache()
    prefix.store([0, 1], [ONE, CHILD], 0)
    prefix.drop(0)
    assert prefix.find_chain([ONE, CHILD]) == []
    assert [content for content, _ in prefix.full_blocks()] == [CHILD]
    prefix.store([2], [ONE], 0)
    assert prefix.find_chain([ONE, CHILD]) == [2, 1]
    assert [content for content, _ in prefix.full_blocks()] == [ONE, CHILD]


def test_extra_keys_separate_beginnings() -> None:
    prefix = cache()
    salted = BlockHash(b"s", ROOT, (1, 2), (("cache_salt", "a"),))
    prefix.store([0], [salted], 0)
    assert prefix.find_beginning(None, (1, 2), (("cache_salt", "a"),)) == (0, 2)
    assert prefix.find_beginning(None, (1, 2), (("cache_salt", "b"),)) is None
    assert prefix.find_beginning(None, (1, 2), None) is None


def test_the_search_for_a_beginning_is_bounded() -> None:
    prefix = cache(MAX_CANDIDATES + 1)
    for block in range(MAX_CANDIDATES + 1):
        content = BlockHash(b"%d" % block, ROOT, (7, block, block, block))
        prefix.store([block], [content], 0)
    assert prefix.find_beginning(None, (7, 1, 1), None) == (1, 3)
    found = prefix.find_beginning(None, (7, 0, 0), None)
    assert found[1] == 1


def test_a_name_that_contradicts_its_blocks_is_noticed() -> None:
    prefix = cache()
    prefix.store([0, 1], [ONE, CHILD], 0)
    prefix._names[b"d"].num_children += 1
    with pytest.raises(IntegrityError, match="children"):
        prefix.check_integrity()
