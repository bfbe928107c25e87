"""Every process knows what the others have under way."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from picker.pool.inflight import InflightLoad
from picker.sharing.block import BlockReader, BlockWriter, create_block
from picker.sharing.load import LoadReader, LoadWriter, publish_nothing


@pytest.fixture
def blocks() -> Iterator[list[int]]:
    """One for each of three processes."""
    fds = [create_block("test", 1000) for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_the_loads_of_others_are_added_up(blocks: list[int]) -> None:
    """And one's own to them; what a process that has ended had under way is over."""
    loads = [InflightLoad() for _ in blocks]
    decisions = [1, 2, 4]
    writers = [
        LoadWriter(BlockWriter(fd), load, lambda number=number: number)  # type: ignore[misc]
        for fd, load, number in zip(blocks, loads, decisions, strict=True)
    ]
    others = LoadReader([BlockReader(fd) for fd in blocks[1:]])
    for load, keys in zip(loads, (["a"], ["a", "b"], ["b", "b"]), strict=True):
        for key in keys:
            load.acquire(key)
    for writer in writers:
        writer.publish()
    assert others.poll()
    loads[0].set_others(others.counts)
    assert dict(loads[0].counts) == {"a": 2, "b": 3}
    assert (loads[0].requests("a"), loads[0].total, loads[0].own_total) == (2, 5, 1)
    assert others.decisions == 6
    publish_nothing(BlockWriter(blocks[2]))
    assert others.poll()
    loads[0].set_others(others.counts)
    loads[0].check_integrity()
    assert dict(loads[0].counts) == {"a": 2, "b": 1}
    loads[0].release("a")
    assert dict(loads[0].counts) == {"a": 1, "b": 1}
    with pytest.raises(LookupError, match="no request is under way at b"):
        loads[0].release("b")


def test_nothing_is_published_while_nothing_changes(blocks: list[int]) -> None:
    """Nobody has to look at what they know."""
    load = InflightLoad()
    writer = LoadWriter(BlockWriter(blocks[0]), load, lambda: 0)
    reader = LoadReader([BlockReader(blocks[0])])
    writer.publish()
    assert reader.poll()
    writer.publish()
    assert not reader.poll()
    load.acquire("a")
    writer.publish()
    assert reader.poll()


def test_a_load_beyond_all_bounds_is_told_once(
    blocks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on with what they knew, until it fits again."""
    load, reader = InflightLoad(), LoadReader([BlockReader(blocks[0])])
    writer = LoadWriter(BlockWriter(blocks[0]), load, lambda: 0)
    keys = [f"default/endpoint-{number}" for number in range(100)]
    for key in keys:
        load.acquire(key)
        writer.publish()
    reader.poll()
    assert 0 < len(reader.counts) < 100
    assert len(caplog.records) == 1
    for key in keys[1:]:
        load.release(key)
    writer.publish()
    reader.poll()
    assert dict(reader.counts) == {keys[0]: 1}
