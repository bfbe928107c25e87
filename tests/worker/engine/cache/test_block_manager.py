"""The block manager: transactions, eviction order, whole-block hits, collisions, events."""

from collections.abc import Iterable

import pytest

from tests.support.worker.kv_blocks import end, find, hashes_of, manager, run, tail_of
from worker.engine.cache.block_hash import BlockHash, PartialBlock
from worker.engine.cache.block_manager import NO_HIT
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import IntegrityError, UnknownSequenceError


def test_a_sequence_holds_the_blocks_that_its_tokens_fill() -> None:
    blocks = manager(8)
    assert blocks.admit(1, 10, NO_HIT)
    assert (len(blocks.table(1)), blocks.usage) == (3, 0.375)
    assert [blocks.num_blocks_needed(1, upto) for upto in (10, 12, 13, 16, 17)] == [0, 0, 1, 1, 2]
    for start, upto, num_held in ((10, 12, 3), (12, 13, 4)):
        assert blocks.allocate(1, start, upto)
        assert len(blocks.table(1)) == num_held
    for _ in range(2):
        blocks.free(1)
        blocks.check_integrity()
        assert (blocks.num_free, blocks.usage, blocks.max_num_used) == (8, 0.0, 4)


def test_a_request_for_too_many_blocks_changes_nothing() -> None:
    blocks = manager(6)
    for seq_id in (1, 2, 3):
        assert blocks.admit(seq_id, 4, NO_HIT)
    blocks.free(2)
    assert blocks.admit(4, 8, NO_HIT)
    assert not blocks.admit(5, 9, NO_HIT)
    assert not blocks.allocate(4, 8, 17)
    assert (len(blocks.table(4)), blocks.num_free) == (2, 2)
    blocks.check_integrity()
    assert blocks.allocate(4, 8, 16)


def test_a_sequence_without_blocks_cannot_grow() -> None:
    blocks = manager(2)
    assert blocks.admit(1, 1, NO_HIT)
    blocks.free(1)
    for seq_id in (1, 99):
        with pytest.raises(UnknownSequenceError, match=str(seq_id)):
            blocks.allocate(seq_id, 1, 2)


@pytest.mark.parametrize(
    ("tokens", "num_hit"),
    [
        (range(12), 8),
        (range(13), 12),
        ([*range(4), 99, 99, 99, 99, *range(8, 12), 0], 4),
        ([99, *range(1, 12)], 0),
    ],
)
def test_whole_block_hits_end_at_a_miss_or_one_token_short(
    tokens: Iterable[int], num_hit: int
) -> None:
    blocks = manager(16, enable_partial_hits=False)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(tokens)) == num_hit


def test_a_hit_protects_contents_from_the_next_eviction() -> None:
    blocks = manager(3)
    old, young = list(range(4)), list(range(100, 104))
    for seq_id, tokens in enumerate((old, young)):
        run(blocks, seq_id, tokens)
        blocks.free(seq_id)
    run(blocks, 2, [*old, 50])
    blocks.free(2)
    assert blocks.admit(3, 8, NO_HIT)
    assert find(blocks, [*old, 51]).num_tokens == 4
    assert find(blocks, [*young, 51]).num_tokens == 0
    assert not blocks.admit(4, 8, NO_HIT)
    blocks.check_integrity()


def test_blocks_are_shared_while_their_sequence_still_runs() -> None:
    blocks = manager(16)
    run(blocks, 1, list(range(9)))
    run(blocks, 2, [*range(8), 50])
    assert list(blocks.table(1)[:2]) == list(blocks.table(2)[:2])
    assert blocks.table(1)[2] != blocks.table(2)[2]
    assert blocks.num_free == 16 - 4
    assert blocks.num_shared_tokens(1) == blocks.num_shared_tokens(2) == 8
    blocks.free(2)
    assert (blocks.num_shared_tokens(1), blocks.num_free) == (0, 16 - 3)


def test_equal_prompts_in_one_step_share_nothing_and_outlive_each_other() -> None:
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


def test_a_tail_behind_a_collision_is_not_stored_in_another_block() -> None:
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


def test_an_eviction_is_reported_once() -> None:
    blocks = manager(4, record_evictions=True)
    chain = hashes_of([*range(8)])
    assert blocks.admit(1, 8, NO_HIT, tenant="x")
    blocks.seal(1, chain, 2)
    assert blocks.admit(2, 4, NO_HIT, tenant="y")
    blocks.seal(2, chain, 1)
    for seq_id in (1, 2):
        blocks.free(seq_id)
    assert blocks.admit(3, 12, NO_HIT, tenant="z")
    evicted = blocks.take_evicted()
    assert [(one.content, one.tenant) for one in evicted] == [(chain[1], "x")]
    assert blocks.take_evicted() == []
    blocks.free(3)
    assert blocks.admit(4, 16, NO_HIT)
    blocks.free(4)
    assert blocks.reset_prefix_cache()
    assert blocks.take_evicted() == []


def test_caching_can_be_off() -> None:
    blocks = manager(4, enable_prefix_caching=False)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert find(blocks, tokens) == NO_HIT
    assert blocks.cached_blocks() == []


def test_a_corrupt_sequence_takes_its_own_hits_with_it() -> None:
    blocks = manager(8, record_events=True)
    run(blocks, 1, list(range(5)))
    run(blocks, 2, [*range(8), 50])
    blocks.take_events()
    blocks.free(2, tail_of([*range(8), 50]), forget=True)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).num_tokens == 4
    assert blocks.take_events() == [BlockRemoved(hashes_of(list(range(8)))[1].digest)]


def test_events_report_the_evictions_of_a_step_before_its_blocks() -> None:
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
    blocks = manager(4)
    run(blocks, 1, list(range(9)))
    blocks._references[blocks.table(1)[0]] += 1
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
