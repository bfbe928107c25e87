"""Header blocks: decoded with the `hpack` library and a cache, encoded without a table.

A proxy opens thousands of streams with the same bytes. A block that inserts no field into the
dynamic table means the same until the table changes, so it is cached by its bytes. Source: RFC
7541.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
from hpack import Decoder

from picker.rpc.calls import joined

Fields = Iterable[tuple[bytes, bytes]]
MAX_REMEMBERED = 256
_STATUS_200 = b"\x88"  # the one whole field of the static table that we send


class HeaderBlocks(msgspec.Struct, eq=False):
    """Owns the decoder of one connection, and the cache of decoded blocks."""

    _decoder: Decoder
    _remembered: dict[bytes, Mapping[bytes, bytes]] = {}

    def decode(self, block: bytes) -> Mapping[bytes, bytes]:
        """Decode a block into `joined` fields. After an `HPACKError` no block can be decoded."""
        known = self._remembered.get(block)
        if known is not None:
            return known
        # Raw bytes: `hpack` would otherwise decode every field as UTF-8, but only four are read.
        fields = joined(list(self._decoder.decode(block, raw=True)))
        if changes_table(block):
            self._remembered.clear()
        elif len(self._remembered) < MAX_REMEMBERED:
            self._remembered[block] = fields
        return fields


def changes_table(block: bytes) -> bool:
    """Return whether a valid block changes the dynamic table or its size. RFC 7541 section 6."""
    at, end = 0, len(block)
    while at < end:
        first = block[at]
        if first & 0x80:  # a field of the table
            at = _after_number(block, at, 0x7F)
        elif first & 0x60:  # 01: a field to insert; 001: a new size
            return True
        else:  # a field outside of the table, its name perhaps from it
            named = first & 0x0F
            at = _after_number(block, at, 0x0F)
            at = _after_text(block, at) if not named else at
            at = _after_text(block, at)
    return False


def _after_number(block: bytes, at: int, mask: int) -> int:
    if block[at] & mask != mask:
        return at + 1
    at += 1
    while block[at] & 0x80:
        at += 1
    return at + 1


def _after_text(block: bytes, at: int) -> int:
    length, shift = block[at] & 0x7F, 0
    at += 1
    if length == 0x7F:
        while True:
            octet = block[at]
            at += 1
            length += (octet & 0x7F) << shift
            shift += 7
            if not octet & 0x80:
                break
    return at + length


def encode_fields(fields: Fields) -> bytes:
    """Encode a block that is independent of the table: no field is inserted or compressed."""
    return b"".join(
        _STATUS_200 if (name, value) == (b":status", b"200") else _encode_field(name, value)
        for name, value in fields
    )


@lru_cache(maxsize=256)
def _encode_field(name: bytes, value: bytes) -> bytes:
    return b"\0" + _text(name) + _text(value)


def _text(data: bytes) -> bytes:
    length = len(data)
    if length < 0x7F:
        return bytes((length,)) + data
    octets = bytearray((0x7F,))
    length -= 0x7F
    while length >= 0x80:
        octets.append(length & 0x7F | 0x80)
        length >>= 7
    octets.append(length)
    return bytes(octets) + data
