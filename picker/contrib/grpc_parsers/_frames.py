"""gRPC bodies: frames that consist of a flag, a length of four bytes, and a message."""

from struct import Struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

_PREFIX = Struct(">?I")
DEFAULT_LIMIT_BYTES = 4 * 2**20
M = TypeVar("M", bound=Message)


def only_message(kind: type[M], body: bytes) -> M:
    """Decode `body`, which must be one uncompressed frame. Raises `ValueError`."""
    if len(body) < _PREFIX.size:
        raise ValueError("shorter than a frame's prefix")
    if body[0] != 0:
        raise ValueError("compressed messages cannot be read")
    _, size = _PREFIX.unpack_from(body)
    if size != len(body) - _PREFIX.size:
        raise ValueError(f"the prefix says {size} bytes, {len(body) - _PREFIX.size} came")
    try:
        return kind.FromString(body[_PREFIX.size :])
    except DecodeError as error:
        raise ValueError(f"the message is not a {kind.DESCRIPTOR.name}") from error


class FrameSplitter:
    """Joins the pieces of a stream into messages; skips compressed and oversized ones."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._pending = bytearray()
        self._to_skip = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes, in order."""
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
