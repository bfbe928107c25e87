"""gRPC over HTTP/2 as bytes, without I/O. Source: grpc/doc/PROTOCOL-HTTP2.md."""

import re
from struct import Struct
from urllib.parse import quote_from_bytes

import msgspec

from picker.rpc.budget import ByteBudget, ByteShare
from picker.rpc.calls import RpcError, Status
from picker.rpc.http2.headers import encode_fields

PREFIX = Struct(">BI")  # compressed flag, length
PREFIX_BYTES = PREFIX.size
MAX_STATUS_TEXT_BYTES = 1024  # before percent-encoding; peers bound their headers
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])", re.ASCII)
_UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class MessageSplitter(msgspec.Struct, eq=False):
    """Splits the data of one stream, in pieces of any size, into messages. Owns the unfinished one.

    That one counts in a budget. While it does not fit, `lacks_room` is true; data is still held.
    """

    max_message_bytes: int
    budget: ByteBudget
    lacks_room: bool = False
    _held: bytearray | None = None  # data of an unfinished message
    _share: ByteShare | None = None  # from the first message that arrives in parts, as few do
    _wanted: int | None = None  # bytes of the message whose prefix has been read

    @property
    def is_between_messages(self) -> bool:
        """True if the stream may end here."""
        return not self._held and self._wanted is None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes. Raises `RpcError`; then the stream is lost."""
        if self._held is None and len(data) >= PREFIX_BYTES:
            compressed, length = PREFIX.unpack_from(data)
            fits = length <= self.max_message_bytes
            if fits and not compressed and length + PREFIX_BYTES == len(data):
                return [data[PREFIX_BYTES:]]  # the usual case: a frame holds exactly one message
        if self._held is None:
            self._held = bytearray()
        held = self._held
        share = self._share = self._share or ByteShare(self.budget)
        held += data
        messages: list[bytes] = []
        start = 0
        while True:
            if self._wanted is None:
                if len(held) - start < PREFIX_BYTES:
                    break
                self._wanted = self._check(*PREFIX.unpack_from(held, start))
                start += PREFIX_BYTES
                if len(held) - start < self._wanted:
                    self.lacks_room = not share.grow(self._wanted)
            if len(held) - start < self._wanted:
                break
            # A slice of the `bytearray` would copy the message twice.
            messages.append(bytes(memoryview(held)[start : start + self._wanted]))
            start += self._wanted
            self._wanted, self.lacks_room = None, False
            share.release()
        del held[:start]
        if not held and self._wanted is None:
            self._held = None
        return messages

    def make_room(self) -> None:
        """Hold the unfinished message although it exceeds the budget."""
        self.lacks_room = False
        if self._share is not None:
            self._share.grow_beyond(self._wanted or 0)

    def discard(self) -> None:
        if self._share is not None:
            self._held, self._wanted, self.lacks_room = None, None, False
            self._share.release()

    def _check(self, compressed: int, length: int) -> int:
        if compressed == 1:
            raise RpcError(Status.UNIMPLEMENTED, "compressed messages are not supported")
        if compressed:
            raise RpcError(Status.INTERNAL, f"a message with the compressed flag {compressed}")
        if length > self.max_message_bytes:
            limit = f"a message of {length} bytes exceeds {self.max_message_bytes}"
            raise RpcError(Status.RESOURCE_EXHAUSTED, limit)
        return length


def trailers(status: Status, text: str) -> bytes:
    number = (b"grpc-status", str(int(status)).encode())
    return encode_fields((number, (b"grpc-message", status_text(text))) if text else (number,))


def status_text(text: str) -> bytes:
    """Encode a `grpc-message` header: percent-encoded, and cut to whole characters."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_STATUS_TEXT_BYTES:
        data = data[:MAX_STATUS_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return quote_from_bytes(data, safe=_PRINTABLE).encode("ascii")


def timeout_seconds(value: bytes) -> float | None:
    """Parse a `grpc-timeout` header; None if it is malformed."""
    match = _TIMEOUT.fullmatch(value)
    return int(match[1]) * _UNIT_SECONDS[match[2]] if match else None
