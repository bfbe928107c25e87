"""The block manager: transactions, eviction order, hits to the token, copy-on-write, events."""

from __future__ import annotations

import pytest

from worker.config import CacheConfig
from worker.engine.block_hash import BlockHash, BlockHasher, PartialBlock, extra_keys
from worker.engine.block_manager import NO_HIT, BlockManager, PrefixHit
from worker.engine.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import IntegrityError, UnknownSequenceError

SIZE = 4
HASHER = BlockHasher(SIZE)


def manager(num_blocks: int, **settings: bool) -> BlockManager:
    """A manager of `num_blocks` blocks of four tokens."""
    return BlockManager(CacheConfig(num_blocks, SIZE, **settings))  # type: ignore[arg-type]


def hashes_of(tokens: list[int], salt: str | None = None) -> list[BlockHash]:
    """The chain over the full blocks of `tokens`."""
    chain: list[BlockHash] = []
    HASHER.extend(chain, tokens, len(tokens) // SIZE, salt)
    return chain


def find(blocks: BlockManager, tokens: list[int], salt: str | None = None) -> PrefixHit:
    """What the cache has of `tokens`."""
    return blocks.match(hashes_of(tokens, salt), tokens, salt)


def run(blocks: BlockManager, seq_id: int, tokens: list[int], tenant: str = "") -> int:
    """Admit a sequence through the cache, run it and seal it; returns the tokens hit."""
    hit = find(blocks, tokens)
    assert blocks.admit(seq_id, len(tokens), hit, tenant=tenant)
    blocks.take_copies()
    chain = hashes_of(tokens)
    blocks.seal(seq_id, chain, len(chain))
    blocks.check_integrity()
    return hit.num_tokens


def tail_of(tokens: list[int], salt: str | None = None) -> PartialBlock:
    """The written tokens after the full blocks of `tokens`."""
    chain = hashes_of(tokens, salt)
    parent = chain[-1].digest if chain else HASHER.root
    return PartialBlock(parent, tuple(tokens[len(chain) * SIZE :]), extra_keys(len(chain), salt))


def end(blocks: BlockManager, seq_id: int, tokens: list[int]) -> None:
    """Free a sequence as the scheduler does: its partial tail stays a hit."""
    blocks.free(seq_id, tail_of(tokens))
    blocks.check_integrity()


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


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(12, 11), (13, 12)])
def test_partial_hits_re_run_one_token_only(num_tokens: int, num_hit: int) -> None:
    """With copies of the matching beginning a known prompt always re-runs a single token."""
    blocks = manager(16)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(range(num_tokens))) == num_hit


def test_a_hit_ends_inside_a_block_of_a_running_sequence() -> None:
    """The beginning of a sealed block with another end is copied, whole blocks are shared."""
    blocks = manager(16)
    run(blocks, 1, [*range(7), 50])
    hit = find(blocks, [*range(7), 60, 61])
    first, second = blocks.table(1)
    assert hit == PrefixHit((first,), 7, second)
    assert blocks.admit(2, 9, hit)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)


def test_the_longest_beginning_wins() -> None:
    """Of several continuations of a block the one with most tokens in common is copied."""
    blocks = manager(16)
    run(blocks, 1, [0, 1, 2, 3, 4, 9, 9, 9])
    run(blocks, 2, [0, 1, 2, 3, 4, 5, 6, 9])
    run(blocks, 3, [0, 1, 2, 3, 4, 5, 9, 9])
    hit = find(blocks, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (hit.num_tokens, hit.partial_block) == (7, blocks.table(2)[1])


def test_an_idle_tail_is_a_hit_until_it_is_taken() -> None:
    """The partly filled block of an ended sequence serves its continuation."""
    blocks = manager(8)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    first, tail = blocks.table(1)
    end(blocks, 1, tokens)
    assert find(blocks, [*tokens, 7, 8]) == PrefixHit((first,), 6, tail)
    assert blocks.admit(2, 8 * SIZE, NO_HIT)
    assert find(blocks, [*tokens, 7, 8]) == NO_HIT
    blocks.check_integrity()


def test_a_tail_of_a_first_block_is_a_hit_once_the_root_is_known() -> None:
    """A prompt shorter than a block is re-used too, under its own salt only."""
    blocks = manager(8)
    run(blocks, 1, list(range(100, 104)))
    assert blocks.admit(2, 3, NO_HIT)
    blocks.free(2, tail_of([1, 2, 3], "salt"))
    blocks.check_integrity()
    assert find(blocks, [1, 2, 3, 4], "salt").num_tokens == 3
    assert find(blocks, [1, 2, 3, 4]).num_tokens == 0
    assert find(blocks, [1, 2, 3, 4], "pepper").num_tokens == 0


def test_a_tail_that_does_not_follow_the_sealed_blocks_is_ignored() -> None:
    """A block is never a hit for a continuation of something that it does not continue."""
    blocks = manager(8)
    run(blocks, 1, list(range(4)))
    assert blocks.admit(2, 6, NO_HIT)
    blocks.free(2, tail_of([*range(4), 50, 51]))
    blocks.check_integrity()
    assert find(blocks, [*range(4), 50, 51]).partial_block is None


def test_a_tail_that_another_block_says_all_of_is_not_kept() -> None:
    """Ten equal prompts leave one idle tail, and a longer one replaces a shorter one."""
    blocks = manager(16)
    run(blocks, 1, list(range(4)))
    for seq_id, length in enumerate((6, 6, 7, 5), start=2):
        tokens = list(range(length))
        run(blocks, seq_id, tokens)
        end(blocks, seq_id, tokens)
    blocks.free(1)
    assert blocks.admit(9, 14 * SIZE, NO_HIT)
    assert blocks.num_evictions == 0
    assert find(blocks, list(range(9))).num_tokens == 7
    blocks.free(9)
    run(blocks, 10, list(range(8)))
    blocks.free(10)
    assert blocks.admit(11, 14 * SIZE, NO_HIT)
    assert blocks.num_evictions == 0
    blocks.check_integrity()


def test_partial_hits_can_be_off() -> None:
    """Then neither other ends nor idle tails are copied."""
    blocks = manager(8, enable_partial_hits=False)
    tokens = list(range(6))
    run(blocks, 1, tokens)
    end(blocks, 1, tokens)
    assert find(blocks, [*tokens, 6, 7]).num_tokens == 4


def test_a_copied_block_may_be_taken_in_the_same_step() -> None:
    """A source need not outlive its copy: it may even be the block that is copied to."""
    blocks = manager(2)
    tokens = list(range(7))
    run(blocks, 1, tokens)
    first, tail = blocks.table(1)
    end(blocks, 1, tokens)
    hit = find(blocks, [*range(6), 60])
    assert hit == PrefixHit((first,), 6, tail)
    assert blocks.admit(2, 7, hit)
    assert blocks.table(2) == [first, tail]
    assert blocks.take_copies() == ()
    blocks.check_integrity()


def test_a_copy_of_a_block_yet_to_be_copied_to_reads_the_first_source() -> None:
    """All sources are read before any destination is written, so copies never form a chain."""
    blocks = manager(8)
    run(blocks, 1, [*range(7), 50])
    source = blocks.table(1)[1]
    assert blocks.admit(2, 9, find(blocks, [*range(7), 60, 61]))
    blocks.fork(2, 3, 7)
    assert blocks.allocate(3, 7, 8)
    assert blocks.take_copies() == ((source, blocks.table(2)[1]), (source, blocks.table(3)[1]))
    blocks.check_integrity()


def test_a_destination_freed_in_the_same_step_is_not_copied_to() -> None:
    """A preempted admission leaves no copy behind, and its unwritten block is no hit."""
    blocks = manager(4)
    run(blocks, 1, [*range(7), 50])
    tokens = [*range(7), 60, 61]
    assert blocks.admit(2, 7, find(blocks, tokens[:8]))
    destination = blocks.table(2)[1]
    blocks.free(2, tail_of(tokens[:7]))
    assert blocks.take_copies() == ()
    blocks.check_integrity()
    assert blocks.admit(3, 4, NO_HIT)
    assert blocks.table(3) == [destination]
    assert blocks.num_evictions == 0


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


def test_a_fork_copies_only_the_partial_tail_and_only_once() -> None:
    """The first side to write gets a copy of the shared tail; the other keeps the original."""
    blocks = manager(8)
    run(blocks, 1, list(range(6)))
    blocks.fork(1, 2, 6)
    shared = list(blocks.table(1))
    assert list(blocks.table(2)) == shared
    assert blocks.num_free == 6
    assert blocks.allocate(2, 6, 7)
    assert blocks.take_copies() == ((shared[1], blocks.table(2)[1]),)
    assert blocks.allocate(1, 6, 7)
    assert blocks.take_copies() == ()
    assert list(blocks.table(1)) == shared
    blocks.check_integrity()


def test_a_fork_from_inside_a_sealed_block_never_writes_into_it() -> None:
    """Even when the parent is gone, the child gets a copy and the original stays a hit."""
    blocks = manager(8)
    run(blocks, 1, list(range(8)))
    first, second = blocks.table(1)
    blocks.fork(1, 2, 6)
    blocks.free(1)
    assert blocks.allocate(2, 6, 8)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).blocks == (first, second)


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    """Full blocks are shared for ever; both sides go on in blocks of their own."""
    blocks = manager(8)
    run(blocks, 1, list(range(8)))
    blocks.fork(1, 2, 8)
    assert blocks.allocate(1, 8, 9)
    assert blocks.allocate(2, 8, 9)
    assert blocks.take_copies() == ()
    assert blocks.table(1)[:2] == blocks.table(2)[:2]
    assert blocks.table(1)[2] != blocks.table(2)[2]


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
