"""A piece of memory that one process writes and others read, without locks and system calls.

Theory of operation. A block holds the number of its latest message and two slots; message n lies in
slot n mod 2, with its number, its length and a digest of both and its bytes. The writer fills the
slot that nobody is sent to, and then changes the number of the latest. A reader that sees a number
it has not read copies the slot, and takes the copy only if its own number and its digest fit. So a
message is either read whole or not at all: when the writer overtook the reader, when it was killed
while it wrote, or when the machine lets a reader see stores in another order, there is nothing to
read until the next look. What was killed is followed by another writer, which goes on numbering.

The file behind a block has no name and takes no memory before it is written to.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import xxhash

from picker.errors import PickerError

_WORD = 8
_HEADER_WORDS = (
    8  # the number of the latest message; the rest keeps the slots on lines of their own
)
_SLOT_WORDS = 8  # number, length, digest


class BlockFullError(PickerError):
    """A message that is longer than a slot."""


def create_block(name: str, capacity_bytes: int) -> int:
    """A file descriptor of an empty block for messages of `capacity_bytes`.

    `name` is for people who look at the process. The descriptor is not inherited by itself.
    """
    slot_bytes = _SLOT_WORDS * _WORD + -(-capacity_bytes // _WORD) * _WORD
    size = _HEADER_WORDS * _WORD + 2 * slot_bytes
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class _Block:
    """What writer and reader know about where things are. `fd` may be closed afterwards."""

    def __init__(self, fd: int, access: int) -> None:
        size = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, size, access=access)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self._slot_words = (len(self._words) - _HEADER_WORDS) // 2
        self.capacity_bytes = (self._slot_words - _SLOT_WORDS) * _WORD

    def close(self) -> None:
        """Let the memory go."""
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _slot(self, number: int) -> int:
        """Where the slot of a message begins, in words."""
        return _HEADER_WORDS + (number % 2) * self._slot_words


class BlockWriter(_Block):
    """The one that writes; there may be only one at a time."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, mmap.ACCESS_WRITE)

    def publish(self, message: bytes) -> None:
        """Make `message` the latest. Raises `BlockFullError`, and then nothing has changed."""
        if len(message) > self.capacity_bytes:
            raise BlockFullError(
                f"{len(message)} bytes do not fit into a block of {self.capacity_bytes}"
            )
        number = self._words[0] + 1
        slot = self._slot(number)
        start = (slot + _SLOT_WORDS) * _WORD
        self._bytes[start : start + len(message)] = message
        self._words[slot] = number
        self._words[slot + 1] = len(message)
        self._words[slot + 2] = _digest(number, message)
        self._words[0] = number


class BlockReader(_Block):
    """One of those who read. Owns the number of the message it has read last."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, mmap.ACCESS_READ)
        self._seen = 0

    def read(self) -> bytes | None:
        """The latest message if it was not read yet and can be read whole; otherwise None."""
        latest = self._words[0]
        if latest == self._seen:
            return None
        slot = self._slot(latest)
        number, length, digest = self._words[slot : slot + 3].tolist()
        if number != latest or length > self.capacity_bytes:
            return None
        start = (slot + _SLOT_WORDS) * _WORD
        message = bytes(self._bytes[start : start + length])
        if _digest(number, message) != digest:
            return None
        self._seen = latest
        return message


def _digest(number: int, message: bytes) -> int:
    """The length is part of it, as it is of the hash; the number is its seed."""
    return int(xxhash.xxh3_64_intdigest(message, seed=number))
