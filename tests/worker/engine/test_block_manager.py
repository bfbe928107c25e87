"""The block manager: transactions, eviction order, hits, copy-on-write, and a random walk."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.config import CacheConfig
from worker.engine.block_hash import BlockHash, BlockHasher
from worker.engine.block_manager import BlockManager, IntegrityError

SIZE = 4


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    """The chain over the full blocks of `tokens`."""
    chain: list[BlockHash] = []
    BlockHasher(SIZE).extend(chain, tokens, len(tokens) // SIZE)
    return chain


def run(blocks: BlockManager, seq_id: int, tokens: list[int]) -> int:
    """Admit a sequence through the cache and seal it; returns the tokens hit."""
    chain = hashes_of(tokens)
    hits = blocks.match(chain, len(tokens))
    assert blocks.admit(seq_id, len(tokens), hits)
    blocks.seal(seq_id, chain, len(chain))
    blocks.check_integrity()
    return len(hits) * SIZE


def test_freed_blocks_come_back() -> None:
    """Ten tokens take three blocks of four; freeing gives them all back."""
    blocks = BlockManager(CacheConfig(8, SIZE))
    assert blocks.admit(1, 10, [])
    assert (blocks.num_free, blocks.usage) == (5, 0.375)
    blocks.free(1)
    blocks.free(1)
    assert (blocks.num_free, blocks.usage) == (8, 0.0)


def test_a_table_grows_only_when_a_block_is_full() -> None:
    """Four tokens fit one block; the fifth takes a second."""
    blocks = BlockManager(CacheConfig(8, SIZE))
    assert blocks.admit(1, 1, [])
    assert blocks.allocate(1, 1, 4)
    assert len(blocks.table(1)) == 1
    assert blocks.allocate(1, 4, 5)
    assert len(blocks.table(1)) == 2


def test_failure_changes_nothing() -> None:
    """Admission and growth that do not fit leave every count as it was, hits included."""
    blocks = BlockManager(CacheConfig(4, SIZE))
    run(blocks, 1, list(range(9)))
    blocks.free(1)
    assert blocks.admit(2, 4, [])
    chain = hashes_of(list(range(9)))
    hits = blocks.match(chain, 9)
    assert len(hits) == 2
    assert not blocks.admit(3, 17, hits)
    assert not blocks.admit(3, 9, hits, reserve=1)
    assert not blocks.allocate(2, 4, 17)
    blocks.check_integrity()
    assert blocks.num_free == 3
    assert blocks.match(chain, 9) == hits
    assert blocks.admit(3, 9, hits)


def test_interleaved_frees_leave_no_external_fragmentation() -> None:
    """Any free blocks serve any sequence, wherever they lie."""
    blocks = BlockManager(CacheConfig(6, SIZE))
    for seq_id in (1, 2, 3):
        assert blocks.admit(seq_id, 4, [])
    blocks.free(2)
    assert blocks.admit(4, 8, [])
    assert blocks.num_free == 2


def test_hits_stop_one_token_short_of_the_whole_sequence() -> None:
    """A block-aligned known prompt re-runs its last block, one token more re-runs one token."""
    blocks = BlockManager(CacheConfig(16, SIZE))
    tokens = list(range(12))
    assert run(blocks, 1, tokens) == 0
    assert run(blocks, 2, tokens) == 8
    assert run(blocks, 3, [*tokens, 99]) == 12


def test_blocks_are_shared_while_their_sequence_still_runs() -> None:
    """A second sequence references the very blocks the first one holds."""
    blocks = BlockManager(CacheConfig(16, SIZE))
    run(blocks, 1, list(range(9)))
    run(blocks, 2, [*range(8), 50])
    assert list(blocks.table(1)[:2]) == list(blocks.table(2)[:2])
    assert blocks.table(1)[2] != blocks.table(2)[2]
    assert blocks.num_free == 16 - 4


def test_idle_contents_stay_hits_until_their_blocks_are_reused() -> None:
    """The tail of the sequence freed first goes first, its head next, then the later sequence's."""
    blocks = BlockManager(CacheConfig(5, SIZE))
    left, right = list(range(9)), list(range(100, 109))
    run(blocks, 1, left)  # blocks: two sealed, one partial
    blocks.free(1)
    run(blocks, 2, right[:8])
    blocks.free(2)
    known = []
    for taken in range(1, 6):
        assert blocks.admit(10 + taken, 4, [])
        known.append(
            (
                len(blocks.match(hashes_of(left), 9)),
                len(blocks.match(hashes_of(right[:8]), 9)),
            )
        )
    assert known == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]
    assert blocks.num_evictions == 4


def test_equal_contents_may_exist_twice_and_outlive_each_other() -> None:
    """Two sequences that ran side by side both cache; when one goes the other serves."""
    blocks = BlockManager(CacheConfig(3, SIZE))
    chain = hashes_of([1, 2, 3, 4])
    for seq_id in (1, 2):
        assert blocks.admit(seq_id, 4, [])
        blocks.seal(seq_id, chain, 1)
    second = blocks.table(2)[0]
    blocks.free(1)
    assert blocks.admit(3, 8, [])
    blocks.check_integrity()
    assert blocks.num_evictions == 1
    assert blocks.match(chain, 5) == [second]


def test_a_digest_collision_is_a_miss() -> None:
    """Contents are compared: equal digests of different contents never answer for each other."""
    blocks = BlockManager(CacheConfig(4, SIZE))
    assert blocks.admit(1, 4, [])
    blocks.seal(1, [BlockHash(b"d", b"one")], 1)
    assert blocks.match([BlockHash(b"d", b"other")], 5) == []
    assert blocks.num_hash_collisions == 1
    assert len(blocks.match([BlockHash(b"d", b"one")], 5)) == 1


def test_reset_forgets_contents_only_when_nothing_runs() -> None:
    """A reset under a running sequence is refused and forgets nothing."""
    blocks = BlockManager(CacheConfig(4, SIZE))
    run(blocks, 1, list(range(5)))
    chain = hashes_of(list(range(5)))
    assert not blocks.reset_prefix_cache()
    assert len(blocks.match(chain, 5)) == 1
    blocks.free(1)
    assert blocks.reset_prefix_cache()
    blocks.check_integrity()
    assert blocks.match(chain, 5) == []


def test_caching_can_be_off() -> None:
    """Without prefix caching nothing is ever a hit."""
    blocks = BlockManager(CacheConfig(4, SIZE, enable_prefix_caching=False))
    run(blocks, 1, list(range(5)))
    assert blocks.match(hashes_of(list(range(5))), 5) == []


def test_a_fork_copies_only_the_partial_tail_and_only_once() -> None:
    """The first side to write gets a copy of the shared tail; the other keeps the original."""
    blocks = BlockManager(CacheConfig(8, SIZE))
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


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    """Full blocks are shared for ever; both sides go on in blocks of their own."""
    blocks = BlockManager(CacheConfig(8, SIZE))
    run(blocks, 1, list(range(8)))
    blocks.fork(1, 2, 8)
    assert blocks.allocate(1, 8, 9)
    assert blocks.allocate(2, 8, 9)
    assert blocks.take_copies() == ()
    assert blocks.table(1)[:2] == blocks.table(2)[:2]
    assert blocks.table(1)[2] != blocks.table(2)[2]


def test_integrity_check_notices_a_broken_invariant() -> None:
    """The check that every other test relies on can fail."""
    blocks = BlockManager(CacheConfig(4, SIZE))
    run(blocks, 1, list(range(9)))
    blocks._references[blocks.table(1)[0]] += 1
    with pytest.raises(IntegrityError):
        blocks.check_integrity()


class BlockWalk(RuleBasedStateMachine):
    """Random admissions, growth, forks and frees against a model that knows only the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(CacheConfig(12, SIZE))
        self.tokens: dict[int, list[int]] = {}
        self.written: dict[int, list[int]] = {}  # block → tokens in its slots
        self.next_id = 0

    def write(self, seq_id: int, start: int) -> None:
        """Store the tokens from `start` on where the table says, then seal what is full."""
        for source, destination in self.blocks.take_copies():
            self.written[destination] = list(self.written[source])
        table, tokens = self.blocks.table(seq_id), self.tokens[seq_id]
        for position in range(start, len(tokens)):
            slots = self.written.setdefault(table[position // SIZE], [0] * SIZE)
            slots[position % SIZE] = tokens[position]
        chain = hashes_of(tokens)
        self.blocks.seal(seq_id, chain, len(chain))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens: list[int]) -> None:
        """A new sequence comes in through the prefix cache, if it fits."""
        chain = hashes_of(tokens)
        hits = self.blocks.match(chain, len(tokens))
        assert len(hits) * SIZE < len(tokens)
        before = self.blocks.num_free
        if self.blocks.admit(self.next_id, len(tokens), hits):
            self.tokens[self.next_id] = tokens
            self.write(self.next_id, len(hits) * SIZE)
            self.next_id += 1
        else:
            assert self.blocks.num_free == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        """A sequence goes on, if there is room."""
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[seq_id])
        before = (self.blocks.num_free, list(self.blocks.table(seq_id)))
        if self.blocks.allocate(seq_id, start, start + len(more)):
            self.tokens[seq_id] = self.tokens[seq_id] + more
            self.write(seq_id, start)
        else:
            assert (self.blocks.num_free, list(self.blocks.table(seq_id))) == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A sequence gets a twin."""
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        self.blocks.fork(parent, self.next_id, len(self.tokens[parent]))
        self.tokens[self.next_id] = list(self.tokens[parent])
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A sequence ends."""
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.blocks.free(seq_id)
        del self.tokens[seq_id]

    @rule()
    def reset(self) -> None:
        """The cache can be dropped exactly when nothing runs."""
        assert self.blocks.reset_prefix_cache() == (not self.tokens)

    @invariant()
    def contents_are_right(self) -> None:
        """Every sequence reads back its own tokens, and the counts add up."""
        self.blocks.check_integrity()
        held = Counter(block for seq_id in self.tokens for block in self.blocks.table(seq_id))
        assert self.blocks.num_free == 12 - len(held)
        for seq_id, tokens in self.tokens.items():
            table = self.blocks.table(seq_id)
            read = [self.written[table[p // SIZE]][p % SIZE] for p in range(len(tokens))]
            assert read == tokens


BlockWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_random_walks_keep_every_invariant = BlockWalk.TestCase
