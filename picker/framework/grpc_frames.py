"""gRPC's framing of messages: a flag, four bytes of length, the message."""

from __future__ import annotations

from struct import Struct

_PREFIX = Struct(">?I")
DEFAULT_LIMIT_BYTES = 4 * 2**20


class FrameError(ValueError):
    """Bytes that are no frame."""


def only_message(data: bytes) -> bytes:
    """The message of the one frame that `data` is. Raises `FrameError`."""
    if len(data) < _PREFIX.size:
        raise FrameError("shorter than a frame's prefix")
    if data[0] != 0:
        raise FrameError("compressed messages cannot be read")
    _, size = _PREFIX.unpack_from(data)
    if size != len(data) - _PREFIX.size:
        raise FrameError(f"the prefix says {size} bytes, {len(data) - _PREFIX.size} came")
    return data[_PREFIX.size :]


class FrameSplitter:
    """Puts the messages of a stream together again, however it is cut.

    A message that is compressed or larger than the limit is skipped; it is never held as a whole.
    """

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._pending = bytearray()
        self._to_skip = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with `data`, in order."""
        messages: list[bytes] = []
        self._pending += data
        position = 0
        while True:
            skipped = min(self._to_skip, len(self._pending) - position)
            position += skipped
            self._to_skip -= skipped
            if len(self._pending) - position < _PREFIX.size:
                break
            _, size = _PREFIX.unpack_from(self._pending, position)
            if self._pending[position] != 0 or size > self._limit:
                position += _PREFIX.size
                self._to_skip = size
                continue
            end = position + _PREFIX.size + size
            if end > len(self._pending):
                break
            messages.append(bytes(self._pending[position + _PREFIX.size : end]))
            position = end
        del self._pending[:position]
        return messages
