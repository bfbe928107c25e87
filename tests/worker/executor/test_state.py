"""The device's state of sequences, updated by differences, equals a rebuild."""

from itertools import takewhile

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.executor.state import DeviceState
from worker.types import BlockTable, ScheduledSequence

CPU = torch.device("cpu")
NUM_SEQUENCES = 300

# What happens to the table of one sequence between two steps.
changes = st.one_of(
    st.tuples(st.just("grow"), st.lists(st.integers(1, 999), max_size=40)),
    st.tuples(st.just("cut"), st.integers(0, 8)),
    st.tuples(st.just("swap"), st.integers(1, 999)),
    st.tuples(st.just("replace"), st.lists(st.integers(1, 999), min_size=1, max_size=6)),
)
steps = st.lists(
    st.one_of(
        st.dictionaries(st.integers(0, NUM_SEQUENCES - 1), changes, min_size=1, max_size=6),
        st.integers(2, 110).map(
            lambda n: {i: ("grow", [i + 1]) for i in range(n, min(2 * n, NUM_SEQUENCES))}
        ),
    ),
    min_size=1,
    max_size=12,
)


def changed(table: list[int], change: tuple[str, object]) -> list[int]:
    kind, value = change
    if kind == "grow":
        return [*table, *value] or [7]  # type: ignore[misc]
    if kind == "cut":
        return table[: len(table) - value] or [7]  # type: ignore[operator]
    if kind == "swap":
        return [*table[:-1], value]  # type: ignore[list-item]
    return list(value)  # type: ignore[call-overload]


def copied(table: list[int], before: BlockTable) -> BlockTable:
    """Copy a table as the block manager does."""
    copy, before.before = BlockTable(table), None
    pairs = zip(table, before, strict=False)
    copy.before = before
    copy.num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return copy


@examples(150)
@given(steps)
def test_tables_by_differences_are_those_of_a_rebuild(
    walk: list[dict[int, tuple[str, object]]],
) -> None:
    """Tables grow, shrink, change in place and come back after their slot went elsewhere; most are
    copies that say what changed.
    """
    state = DeviceState(4, CPU)
    tables: dict[int, list[int]] = {}
    copies: dict[int, BlockTable] = {}
    drawn: dict[int, int] = {}
    for number, step in enumerate(walk):
        for seq_id, change in step.items():
            tables[seq_id] = changed(tables.get(seq_id, []), change)
            copies[seq_id] = copied(tables[seq_id], copies.get(seq_id, BlockTable()))
        # Of every third sequence, an executor knows nothing but the blocks.
        given = {i: copies[i] if i % 3 else tuple(tables[i]) for i in step}
        sequences = [ScheduledSequence(i, [0], 0, given[i]) for i in step]
        slots = state.enter(sequences)
        assert len(set(slots.tolist())) == len(step)
        width = max(len(tables[i]) for i in step)
        on_device = state.tables(torch.from_numpy(slots), width).tolist()
        rebuilt = DeviceState(4, CPU)
        fresh = rebuilt.enter(sequences)
        for row, place, again, seq_id in zip(on_device, slots, fresh, step, strict=True):
            table, columns = tables[seq_id], np.arange(len(tables[seq_id]), dtype=np.int32)
            assert row[: len(table)] == table
            for one, slot in ((state, place), (rebuilt, again)):
                assert one.blocks(np.full(len(table), slot), columns).tolist() == table
        known = [i for i in step if i in drawn]
        assert [state.last_token(i) for i in known] == [drawn[i] for i in known]
        drawn = {i: 1000 * number + i for i in step}
        state.remember(slots, torch.tensor([drawn[i] for i in step]))


def test_slots_are_used_again() -> None:
    """A worker that serves forever keeps as many slots as it once needed at a time."""
    state = DeviceState(16, CPU)
    for first in range(0, 100_000, 50):
        slots = state.enter([ScheduledSequence(first + i, [0], 0, (1, 2)) for i in range(50)])
        assert slots.max() < 128
