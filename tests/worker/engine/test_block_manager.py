"""The block manager: transactions, eviction order, whole-block hits, collisions, events."""

from __future__ import annotations

import pytest
from kv_blocks import end, find, hashes_of, manager, run, tail_of

from worker.engine.block_hash import BlockHash, PartialBlock
from worker.engine.block_manager import NO_HIT
from worker.engine.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import IntegrityError, UnknownSequenceError


def test_growth_that_does_not_fit_changes_nothing() -> None:
    """Admission and growth that do not fit leave every count as it was, hits included."""
    blocks = manager(4)
    tokens = list(range(10))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert blocks.admit(2, 4, NO_HIT)
    hit = find(blocks, tokens)
    assert (len(hit.blocks), hit.num_tokens) == (2, 9)
    assert not blocks.admit(3, 17, hit)
    assert not blocks.admit(3, 10, hit, reserve=1)
    assert not blocks.allocate(2, 4, 17)
    blocks.check_integrity()
    assert blocks.num_free == 3
    assert blocks.take_copies() == ()
    assert find(blocks, tokens) == hit
    assert blocks.admit(3, 10, hit)


def test_an_unknown_sequence_is_an_error_except_to_free() -> None:
    """Whoever names a sequence without blocks is told so; freeing twice does no harm."""
    blocks = manager(4)
    for ask in (blocks.table, blocks.num_shared_tokens):
        with pytest.raises(UnknownSequenceError, match="sequence 7"):
            ask(7)
    with pytest.raises(UnknownSequenceError):
        blocks.fork(7, 8, 1)
    with pytest.raises(UnknownSequenceError):
        blocks.seal(7, [], 0)
    blocks.free(7)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(12, 8), (13, 12)])
def test_whole_block_hits_stop_one_token_short(num_tokens: int, num_hit: int) -> None:
    """An exactly known multiple re-runs its last block; one token more re-runs one token."""
    blocks = manager(16, enable_partial_hits=False)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(range(num_tokens))) == num_hit


def test_blocks_are_shared_while_their_sequence_still_runs() -> None:
    """A second sequence references the very blocks the first one holds."""
    blocks = manager(16)
    run(blocks, 1, list(range(9)))
    run(blocks, 2, [*range(8), 50])
    assert list(blocks.table(1)[:2]) == list(blocks.table(2)[:2])
    assert blocks.table(1)[2] != blocks.table(2)[2]
    assert blocks.num_free == 16 - 4
    assert blocks.num_shared_tokens(1) == blocks.num_shared_tokens(2) == 8
    blocks.free(2)
    assert blocks.num_shared_tokens(1) == 0


def test_idle_contents_stay_hits_until_their_blocks_are_reused() -> None:
    """Of what was freed first the tail goes before the head, then the same of the later one."""
    blocks = manager(5)
    left, right = list(range(9)), list(range(100, 109))
    run(blocks, 1, left)  # blocks: two sealed, one partial that nobody keeps
    blocks.free(1)
    run(blocks, 2, right[:8])
    blocks.free(2)
    known = []
    for taken in range(1, 6):
        assert blocks.admit(10 + taken, 4, NO_HIT)
        known.append((len(find(blocks, left).blocks), len(find(blocks, [*right[:8], 0]).blocks)))
    assert known == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]
    assert blocks.num_evictions == 4


def test_equal_prompts_in_one_step_share_nothing_and_outlive_each_other() -> None:
    """Two sequences that ran side by side both cache; when one goes the other serves."""
    blocks = manager(3)
    chain = hashes_of([1, 2, 3, 4])
    for seq_id in (1, 2):
        assert blocks.admit(seq_id, 4, NO_HIT)
    for seq_id in (1, 2):
        blocks.seal(seq_id, chain, 1)
    second = blocks.table(2)[0]
    assert second != blocks.table(1)[0]
    blocks.free(1)
    assert blocks.admit(3, 8, NO_HIT)
    blocks.check_integrity()
    assert blocks.num_evictions == 1
    assert find(blocks, [1, 2, 3, 4, 5]).blocks == (second,)


def test_a_digest_collision_is_neither_found_nor_stored() -> None:
    """Contents are compared: equal digests of different contents never answer for each other."""
    blocks = manager(6, enable_partial_hits=False)
    one, other = BlockHash(b"d", b"", (1, 1, 1, 1)), BlockHash(b"d", b"", (2, 2, 2, 2))
    child = BlockHash(b"e", b"d", (3, 3, 3, 3))
    assert blocks.admit(1, 8, NO_HIT)
    blocks.seal(1, [one, child], 2)
    assert blocks.match([other], [2] * 5) == NO_HIT
    assert blocks.num_hash_collisions == 1
    assert blocks.admit(2, 8, NO_HIT)
    blocks.seal(2, [other, child], 2)
    blocks.check_integrity()
    assert blocks.num_hash_collisions == 2
    assert blocks.match([one, child], [1] * 9).blocks == tuple(blocks.table(1))


def test_a_tail_behind_a_collision_is_not_kept_in_another_block() -> None:
    """Its parent's digest is that of the block where sealing ended; the block after holds more."""
    blocks = manager(6)
    first = BlockHash(b"d", b"", (1, 1, 1, 1))
    second = BlockHash(b"d", b"d", (2, 2, 2, 2))
    assert blocks.admit(1, 10, NO_HIT)
    blocks.seal(1, [first, second], 2)
    blocks.free(1, PartialBlock(2, b"d", (3, 3)))
    blocks.check_integrity()
    hit = blocks.match([first], [1, 1, 1, 1, 3, 3, 3])
    assert hit.num_tokens == 4
    assert hit.partial_block is None


def test_reset_forgets_contents_only_when_nothing_runs() -> None:
    """A reset under a running sequence is refused and forgets nothing."""
    blocks = manager(4)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    assert not blocks.reset_prefix_cache()
    assert find(blocks, tokens).num_tokens == 4
    end(blocks, 1, tokens)
    assert blocks.reset_prefix_cache()
    blocks.check_integrity()
    assert find(blocks, tokens) == NO_HIT
    assert blocks.num_free == 4


def test_caching_can_be_off() -> None:
    """Without prefix caching nothing is ever a hit."""
    blocks = manager(4, enable_prefix_caching=False)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert find(blocks, tokens) == NO_HIT
    assert blocks.cached_blocks() == []


def test_a_corrupt_sequence_takes_its_own_hits_with_it() -> None:
    """What only it holds is forgotten, what others hold too stays theirs."""
    blocks = manager(8, record_events=True)
    run(blocks, 1, list(range(5)))
    run(blocks, 2, [*range(8), 50])
    blocks.take_events()
    blocks.free(2, tail_of([*range(8), 50]), forget=True)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).num_tokens == 4
    assert blocks.take_events() == [BlockRemoved(hashes_of(list(range(8)))[1].digest)]


def test_a_flooding_tenant_evicts_its_own_blocks_first() -> None:
    """Half of the pool stays the other's however much passes through."""
    blocks = manager(8)
    quiet = list(range(16))
    run(blocks, 1, quiet, "quiet")
    blocks.free(1)
    for seq_id in range(2, 20):
        run(blocks, seq_id, [seq_id * 100 + i for i in range(8)], "flood")
        blocks.free(seq_id)
    assert find(blocks, [*quiet, 99]).num_tokens == 16


def test_without_fair_eviction_the_oldest_goes_whoseever_it_is() -> None:
    """Plain LRU, the tenants do not matter."""
    blocks = manager(8, enable_fair_eviction=False)
    quiet = list(range(16))
    run(blocks, 1, quiet, "quiet")
    blocks.free(1)
    for seq_id in range(2, 6):
        run(blocks, seq_id, [seq_id * 100 + i for i in range(8)], "flood")
        blocks.free(seq_id)
    assert find(blocks, [*quiet, 99]).num_tokens == 0


def test_events_tell_what_a_step_throws_out_before_what_it_stores() -> None:
    """A run of blocks is one event with the block before it as parent; eviction tells one each."""
    blocks = manager(3, record_events=True)
    old, new = hashes_of(list(range(8))), hashes_of(list(range(100, 112)))
    run(blocks, 1, list(range(8)))
    blocks.free(1)
    assert blocks.admit(2, 12, NO_HIT)
    blocks.seal(2, new, 1)
    blocks.seal(2, new, 3)
    expected: list[CacheEvent] = [
        BlocksStored((old[0], old[1]), None),
        BlockRemoved(old[1].digest),
        BlockRemoved(old[0].digest),
        BlocksStored((new[0],), None),
        BlocksStored((new[1], new[2]), new[0].digest),
    ]
    assert blocks.take_events() == expected
    assert blocks.take_events() == []
    blocks.free(2)
    assert blocks.reset_prefix_cache()
    assert blocks.take_events() == [CacheCleared()]


def test_the_dump_lists_parents_before_children_and_copies_twice() -> None:
    """Each cached full block stands in it with what a mirror needs."""
    blocks = manager(8)
    tokens, chain = list(range(8)), hashes_of(list(range(8)), "s")
    for seq_id in (1, 2):
        assert blocks.admit(seq_id, 10, NO_HIT)
        blocks.seal(seq_id, chain, 2)
    dump = blocks.cached_blocks()
    assert [(b.block_hash, b.parent, b.cache_salt) for b in dump] == [
        (chain[0].digest, None, "s"),
        (chain[0].digest, None, "s"),
        (chain[1].digest, chain[0].digest, None),
        (chain[1].digest, chain[0].digest, None),
    ]
    assert [b.token_ids for b in dump[1:3]] == [tokens[:4], tokens[4:]]


def test_integrity_check_notices_a_broken_invariant() -> None:
    """The check that every other test relies on can fail."""
    blocks = manager(4)
    run(blocks, 1, list(range(9)))
    blocks._references[blocks.table(1)[0]] += 1
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
