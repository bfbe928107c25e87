"""Messages through shared memory are read whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.sharing.block import BlockFullError, BlockReader, BlockWriter, create_block

MESSAGES = 3000
# Each message tells its own number and is as long as it says, filled with one byte.
WRITE = """
import sys
from picker.sharing.block import BlockWriter
writer = BlockWriter(int(sys.argv[1]))
for number in range(1, int(sys.argv[2]) + 1):
    length = number * 37 % 40_000
    writer.publish(number.to_bytes(4, "big") + bytes([number % 251]) * length)
"""


@pytest.fixture
def block() -> Iterator[int]:
    """A block for messages of 100 bytes or a few more."""
    fd = create_block("test", 100)
    yield fd
    os.close(fd)


def test_a_message_is_read_once(block: int) -> None:
    """The latest; one that was overtaken is never seen."""
    writer, reader = BlockWriter(block), BlockReader(block)
    assert reader.read() is None
    writer.publish(b"one")
    assert (reader.read(), reader.read()) == (b"one", None)
    writer.publish(b"two")
    writer.publish(b"")
    assert (reader.read(), reader.read()) == (b"", None)


def test_every_reader_sees_the_latest(block: int) -> None:
    """Also one that comes late."""
    writer, early = BlockWriter(block), BlockReader(block)
    writer.publish(b"one")
    assert early.read() == b"one"
    assert BlockReader(block).read() == b"one"


def test_what_does_not_fit_changes_nothing(block: int) -> None:
    """The largest that does is taken."""
    writer, reader = BlockWriter(block), BlockReader(block)
    assert writer.capacity_bytes >= 100
    writer.publish(b"x" * writer.capacity_bytes)
    with pytest.raises(BlockFullError, match="do not fit"):
        writer.publish(b"x" * (writer.capacity_bytes + 1))
    assert reader.read() == b"x" * writer.capacity_bytes


def test_a_writer_goes_on_where_one_before_was_killed(block: int) -> None:
    """Whatever that had begun to write."""
    reader, killed = BlockReader(block), BlockWriter(block)
    killed.publish(b"one")
    assert reader.read() == b"one"
    killed._bytes[64 + 104 + 64 :] = b"\xff" * (len(killed._bytes) - 64 - 104 - 64)
    killed.close()
    assert reader.read() is None
    successor = BlockWriter(block)
    successor.publish(b"two")
    assert reader.read() == b"two"
    successor.publish(b"three")
    assert reader.read() == b"three"


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=3),
    st.data(),
)
def test_a_message_that_is_not_whole_is_not_read(
    messages: list[bytes], data: st.DataObject
) -> None:
    """Whatever bit of the block another writer, or another order of stores, has changed."""
    fd = create_block("test", 100)
    try:
        writer, reader = BlockWriter(fd), BlockReader(fd)
        for message in messages:
            writer.publish(message)
        place = data.draw(st.integers(0, len(writer._bytes) - 1))
        writer._bytes[place] ^= 1 << data.draw(st.integers(0, 7))
        # The number of the latest may now be that of the message before, which is whole.
        assert reader.read() in (None, *messages[-2:])
    finally:
        os.close(fd)


def test_a_reader_beside_a_writer_sees_only_what_was_written() -> None:
    """Two processes at full speed: every message is whole, and later than the one before."""
    fd = create_block("test", 50_000)
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(fd), str(MESSAGES)], pass_fds=(fd,)
    ) as writer:
        reader, last = BlockReader(fd), 0
        while last < MESSAGES and (writer.poll() in (None, 0)):
            message = reader.read()
            if message is None:
                continue
            number = int.from_bytes(message[:4], "big")
            assert number > last
            assert message[4:] == bytes([number % 251]) * (number * 37 % 40_000)
            last = number
    os.close(fd)
    assert (writer.returncode, last) == (0, MESSAGES)
