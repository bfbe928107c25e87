"""The phases of kv-cache-scheduler and its invariants, each with its counterpart here; those of the
pool and of shared prefills are in test_free_queue and test_block_manager.
"""

from __future__ import annotations

from tests.support.worker.kv_blocks import SIZE, find, hashes_of, manager, run
from worker.engine.block_manager import NO_HIT


def test_freeing_what_is_free_never_counts_below_zero() -> None:
    """There a second release panics; here an id without blocks has nothing to release."""
    blocks = manager(4)
    assert blocks.admit(1, 4, NO_HIT)
    blocks.free(1)
    blocks.free(1)
    blocks.check_integrity()
    assert blocks.num_free == 4


def test_block_table_maps_a_token_to_its_block_and_slot() -> None:
    """Token i stands in block i // size at slot i % size; a block is added at its boundary."""
    blocks = manager(8)
    assert blocks.admit(1, 1, NO_HIT)
    for position in range(1, 10):
        assert blocks.allocate(1, position, position + 1)
        assert len(blocks.table(1)) == position // SIZE + 1
    table = blocks.table(1)
    slots = {(table[i // SIZE], i % SIZE) for i in range(10)}
    assert len(slots) == 10


def test_finish_releases_every_block() -> None:
    """Shared ones when the last holder goes, the others at once."""
    blocks = manager(16)
    run(blocks, 1, list(range(10)))
    run(blocks, 2, [*range(8), 77, 78])
    blocks.free(1)
    assert blocks.num_free == 16 - 3
    blocks.free(2)
    assert blocks.num_free == 16


def test_prefix_match_stops_at_the_first_miss() -> None:
    """A cached block behind one that is not does not count."""
    blocks = manager(16, enable_partial_hits=False)
    run(blocks, 1, list(range(12)))
    other = [*range(4), 99, 99, 99, 99, *range(8, 12), 0]
    assert find(blocks, other).num_tokens == 4
    assert find(blocks, [99, *range(1, 12)]).num_tokens == 0


def test_lru_eviction_takes_the_contents_used_longest_ago() -> None:
    """A hit makes contents young again; who runs is never evicted for a newcomer."""
    blocks = manager(3)
    old, young = list(range(4)), list(range(100, 104))
    for seq_id, tokens in enumerate((old, young)):
        run(blocks, seq_id, tokens)
        blocks.free(seq_id)
    run(blocks, 2, [*old, 50])  # hits, and takes the last empty block
    blocks.free(2)
    assert blocks.admit(3, 8, NO_HIT)
    assert find(blocks, [*old, 51]).num_tokens == 4
    assert find(blocks, [*young, 51]).num_tokens == 0
    assert not blocks.admit(4, 8, NO_HIT)
    blocks.check_integrity()


def test_cow_fork_copies_a_shared_partial_tail_once_and_no_full_block() -> None:
    """Both hold all blocks; the first to go on gets a copy of the tail, and only of it."""
    blocks = manager(8)
    run(blocks, 1, list(range(10)))
    blocks.fork(1, 2, 10)
    assert blocks.num_free == 8 - 3
    assert blocks.allocate(1, 10, 11)
    assert blocks.allocate(2, 10, 11)
    assert blocks.take_copies() == ((blocks.table(2)[2], blocks.table(1)[2]),)
    assert blocks.table(1)[:2] == blocks.table(2)[:2]


def test_ensure_unshared_leaves_an_exclusive_tail_alone() -> None:
    """With one holder nothing is copied, nor at a block boundary."""
    blocks = manager(8)
    run(blocks, 1, list(range(6)))
    blocks.fork(1, 2, 6)
    blocks.free(1)
    assert blocks.allocate(2, 6, 9)
    assert blocks.take_copies() == ()


def test_a_block_is_free_iff_nobody_references_it() -> None:
    """Whatever is shared leaves the free queue with its first holder and returns with its last."""
    blocks = manager(4)
    run(blocks, 1, list(range(8)))
    blocks.fork(1, 2, 8)
    blocks.fork(2, 3, 4)
    free = []
    for seq_id in (1, 2, 3):
        blocks.free(seq_id)
        blocks.check_integrity()
        free.append(blocks.num_free)
    assert free == [2, 3, 4]


def test_a_sealed_block_is_never_written_again() -> None:
    """Whatever grows, the blocks sealed before stay in place, and growth goes elsewhere."""
    blocks = manager(8)
    run(blocks, 1, list(range(8)))
    sealed = list(blocks.table(1))
    run(blocks, 2, [*range(8), 50, 51])
    blocks.fork(1, 3, 6)
    for seq_id, start in ((1, 8), (2, 10), (3, 6)):
        assert blocks.allocate(seq_id, start, start + 1)
        assert blocks.table(seq_id)[start // SIZE] not in sealed
    assert list(blocks.table(1)[:2]) == sealed


def test_a_finished_sequence_leaves_no_dangling_reference() -> None:
    """There the trie names freed blocks, and a hit may hold one that is in the free list. Here
    idle contents are in the queue openly: a hit takes them out, and re-use makes them a miss.
    """
    blocks = manager(4)
    tokens = list(range(9))
    run(blocks, 1, tokens)
    blocks.free(1)
    hit = find(blocks, tokens)
    assert hit.num_tokens == 8
    assert blocks.admit(2, 9, hit)
    blocks.check_integrity()
    assert blocks.admit(3, 4, NO_HIT)
    assert not set(blocks.table(3)) & set(blocks.table(2))
    blocks.free(2)
    blocks.free(3)
    assert blocks.admit(4, 16, NO_HIT)
    assert find(blocks, tokens) == NO_HIT
    assert blocks.match(hashes_of(tokens), tokens) == NO_HIT
    blocks.check_integrity()
