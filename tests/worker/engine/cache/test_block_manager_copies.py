"""Copied blocks: hits inside a block, idle tails, forks, and copies that meet in one step."""

import pytest

from tests.support.worker.kv_blocks import SIZE, end, find, manager, run, tail_of
from worker.engine.cache.block_manager import NO_HIT, PrefixHit


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(12, 11), (13, 12)])
def test_partial_hits_re_run_one_token_only(num_tokens: int, num_hit: int) -> None:
    blocks = manager(16)
    run(blocks, 1, list(range(12)))
    assert run(blocks, 2, list(range(num_tokens))) == num_hit


def test_a_hit_ends_inside_a_block_of_a_running_sequence() -> None:
    blocks = manager(16)
    run(blocks, 1, [*range(7), 50])
    hit = find(blocks, [*range(7), 60, 61])
    first, second = blocks.table(1)
    assert hit == PrefixHit((first,), 7, second)
    assert blocks.admit(2, 9, hit)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)


def test_the_longest_beginning_wins() -> None:
    """The continuation of a block with the most tokens in common is copied."""
    blocks = manager(16)
    run(blocks, 1, [0, 1, 2, 3, 4, 9, 9, 9])
    run(blocks, 2, [0, 1, 2, 3, 4, 5, 6, 9])
    run(blocks, 3, [0, 1, 2, 3, 4, 5, 9, 9])
    hit = find(blocks, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (hit.num_tokens, hit.partial_block) == (7, blocks.table(2)[1])


def test_an_idle_tail_is_a_hit_until_it_is_taken() -> None:
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
    blocks = manager(8)
    run(blocks, 1, list(range(100, 104)))
    assert blocks.admit(2, 3, NO_HIT)
    blocks.free(2, tail_of([1, 2, 3], "salt"))
    blocks.check_integrity()
    assert find(blocks, [1, 2, 3, 4], "salt").num_tokens == 3
    assert find(blocks, [1, 2, 3, 4]).num_tokens == 0
    assert find(blocks, [1, 2, 3, 4], "pepper").num_tokens == 0


def test_a_tail_that_does_not_follow_the_sealed_blocks_is_ignored() -> None:
    blocks = manager(8)
    run(blocks, 1, list(range(4)))
    assert blocks.admit(2, 6, NO_HIT)
    blocks.free(2, tail_of([*range(4), 50, 51]))
    blocks.check_integrity()
    assert find(blocks, [*range(4), 50, 51]).partial_block is None


def test_a_tail_that_another_block_contains_is_not_stored() -> None:
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


def test_a_fork_from_inside_a_sealed_block_never_writes_into_it() -> None:
    blocks = manager(8)
    run(blocks, 1, list(range(8)))
    first, second = blocks.table(1)
    blocks.fork(1, 2, 6)
    blocks.free(1)
    assert blocks.allocate(2, 6, 8)
    assert blocks.take_copies() == ((second, blocks.table(2)[1]),)
    blocks.check_integrity()
    assert find(blocks, [*range(8), 50]).blocks == (first, second)


def test_a_tail_that_only_one_sequence_holds_is_not_copied() -> None:
    """The first of two holders to write gets the copy; the other one writes in place."""
    blocks = manager(8)
    run(blocks, 1, list(range(6)))
    for child_id in (2, 3):
        blocks.fork(1, child_id, 6)
    blocks.free(1)
    tail = blocks.table(3)[1]
    assert blocks.allocate(2, 6, 9)
    assert blocks.take_copies() == ((tail, blocks.table(2)[1]),)
    assert blocks.allocate(3, 6, 9)
    assert blocks.take_copies() == ()
    assert blocks.table(3)[1] == tail
