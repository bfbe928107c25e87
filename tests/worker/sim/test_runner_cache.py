"""An echo reads the contents of blocks through tables, copies and shared prefixes."""

from worker.sim.runner import TokenCache, spoken
from worker.types import ScheduledSequence

TURN, END = 90, 91


def run(seq_id: int, tokens: list[int], start: int, table: list[int]) -> ScheduledSequence:
    return ScheduledSequence(seq_id, tokens, start, table)


def test_chunks_follow_the_block_table_across_blocks() -> None:
    cache = TokenCache(num_blocks=4, block_size=4)
    cache.write(run(1, [1, 2, 3], 0, [3, 0, 2]))
    cache.write(run(1, [4, 5, 6, 7, 8, 9], 3, [3, 0, 2]))
    assert cache.echo(run(1, [9], 8, [3, 0, 2]), 9, None, None) == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    other = run(2, [9], 8, [3, 0, 1])  # shares the first two blocks
    assert cache.echo(other, 8, None, None) == (1, 2, 3, 4, 5, 6, 7, 8)


def test_copies_can_swap_two_blocks() -> None:
    cache = TokenCache(num_blocks=2, block_size=2)
    cache.write(run(1, [1, 2, 3, 4], 0, [0, 1]))
    cache.copy(((0, 1), (1, 0)))
    assert cache.echo(run(2, [0], 3, [0, 1]), 4, None, None) == (3, 4, 1, 2)


def test_an_echo_is_read_once() -> None:
    """Later writes to its blocks do not change a running answer."""
    cache = TokenCache(num_blocks=1, block_size=4)
    sequence = run(1, [5, 6], 0, [0])
    cache.write(sequence)
    assert cache.echo(sequence, 2, None, None) == (5, 6)
    cache.write(run(2, [8, 8], 0, [0]))
    assert cache.echo(sequence, 2, None, None) == (5, 6)


def test_a_conversation_echoes_its_last_turn() -> None:
    prompt = [TURN, 1, 10, 21, 22, END, 10, TURN, 2, 10, 31, 10, 32, END, 10, TURN, 3, 10]
    assert spoken(prompt, TURN, END) == (31, 10, 32)
    assert spoken([TURN, 7, 8, END], TURN, END) == (7, 8)
    assert spoken([5, 6, 7], TURN, END) == (5, 6, 7)
    assert spoken([5, END, 7], None, END) == (5, 7)
    assert spoken([5, 6], None, None) == (5, 6)
