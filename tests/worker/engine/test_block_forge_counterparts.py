"""The cache tests of forge-infer, by their names and with their numbers.

A table grows here by `allocate(id, start, end)`; whoever calls knows how many tokens are written.
"""

from __future__ import annotations

import pytest

from worker.config import CacheConfig
from worker.engine.block_manager import NO_HIT, BlockManager
from worker.errors import UnknownSequenceError

SIZE = 4


def blocks_of(num_blocks: int) -> BlockManager:
    """A manager of blocks of four tokens."""
    return BlockManager(CacheConfig(num_blocks, SIZE))


def num_used(blocks: BlockManager, num_blocks: int) -> int:
    return num_blocks - blocks.num_free


def test_allocate_and_free_round_trips() -> None:
    """8 blocks of 4: 10 tokens use 3; freeing gives all 8 back."""
    blocks = blocks_of(8)
    assert blocks.admit(1, 10, NO_HIT)
    assert (num_used(blocks, 8), len(blocks.table(1)), blocks.usage) == (3, 3, 0.375)
    blocks.free(1)
    assert (blocks.num_free, blocks.usage) == (8, 0.0)
    blocks.check_integrity()


def test_lazy_growth_only_allocates_when_a_block_fills() -> None:
    """1 token: 1 block; 3 more: still 1; 1 more: 2."""
    blocks = blocks_of(8)
    assert blocks.admit(1, 1, NO_HIT)
    counts = [len(blocks.table(1))]
    for start, end in ((1, 4), (4, 5)):
        assert blocks.allocate(1, start, end)
        counts.append(len(blocks.table(1)))
    assert counts == [1, 1, 2]


def test_internal_fragmentation_is_bounded_by_block_size() -> None:
    """3 sequences of 5 tokens leave exactly 9 slots unused, less than a block each."""
    blocks = blocks_of(8)
    slack = []
    for seq_id in (1, 2, 3):
        assert blocks.admit(seq_id, 5, NO_HIT)
        slack.append(len(blocks.table(seq_id)) * SIZE - 5)
    assert sum(slack) == 9
    assert max(slack) < SIZE


def test_out_of_blocks_is_reported_and_leaves_state_intact() -> None:
    """2 blocks of 4, both held: another token does not fit, and nothing has changed."""
    blocks = blocks_of(2)
    assert blocks.admit(1, 8, NO_HIT)
    assert not blocks.admit(2, 1, NO_HIT)
    with pytest.raises(UnknownSequenceError):
        blocks.table(2)
    assert not blocks.allocate(1, 8, 9)
    assert (blocks.num_blocks_needed(1, 9), blocks.num_free) == (1, 0)
    assert len(blocks.table(1)) == 2
    blocks.check_integrity()


def test_no_external_fragmentation_after_interleaved_free() -> None:
    """6 blocks, 3 sequences of 4 tokens, the second goes: 8 tokens fit and 2 blocks are free."""
    blocks = blocks_of(6)
    for seq_id in (1, 2, 3):
        assert blocks.admit(seq_id, 4, NO_HIT)
    blocks.free(2)
    assert blocks.admit(4, 8, NO_HIT)
    assert blocks.num_free == 2


def test_blocks_needed_accounts_for_slack() -> None:
    """With 2 tokens held, 2 more need nothing, 3 a block, 6 still one, 7 two."""
    blocks = blocks_of(8)
    assert blocks.admit(1, 2, NO_HIT)
    assert [blocks.num_blocks_needed(1, 2 + more) for more in (2, 3, 6, 7)] == [0, 1, 1, 2]


def test_unknown_sequence_append_errors() -> None:
    """Growing a sequence that was never admitted, or was freed, is an error that names it."""
    blocks = blocks_of(2)
    with pytest.raises(UnknownSequenceError, match="99"):
        blocks.allocate(99, 0, 1)
    assert blocks.admit(1, 1, NO_HIT)
    blocks.free(1)
    with pytest.raises(UnknownSequenceError):
        blocks.allocate(1, 1, 2)


def test_peak_blocks_tracks_the_high_water_mark_not_the_current_use() -> None:
    """The most blocks ever held stays after they are freed."""
    blocks = blocks_of(8)
    assert blocks.admit(1, 8, NO_HIT)
    assert blocks.admit(2, 4, NO_HIT)
    assert blocks.allocate(2, 4, 5)
    blocks.free(1)
    assert blocks.admit(3, 1, NO_HIT)
    assert (blocks.max_num_used, num_used(blocks, 8)) == (4, 3)
