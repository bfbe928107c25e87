"""Reads single fields of protobuf messages from their bytes, without generated code.

Strict: whatever the format does not allow is an error, and so are the groups of proto2. A field of
a type other than the one asked for is as good as absent, as it is to protobuf itself.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10
_UINT64 = 2**64 - 1
MAX_FIELDS = 2**16  # a field may be of two bytes, and takes a microsecond to read
MAX_FIELDS_OF_ITEM = 64

Value = int | bytes


class WireError(ValueError):
    """Bytes that are no protobuf message."""


def fields(message: bytes, limit: int = MAX_FIELDS) -> Iterator[tuple[int, Value]]:
    """Number and value of each field, in order; a whole number for a varint, else its bytes.

    Raises `WireError`, for more than `limit` fields as well.
    """
    position, end = 0, len(message)
    while position < end:
        limit -= 1
        if limit < 0:
            raise WireError("a message has too many fields")
        key, position = _varint(message, position)
        number, wire_type = key >> 3, key & 7
        if not 0 < number < 2**29:
            raise WireError(f"there is no field number {number}")
        if wire_type == VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire_type == LENGTH_DELIMITED:
            size, position = _varint(message, position)
        elif wire_type in _SIZES:
            size = _SIZES[wire_type]
        else:
            raise WireError(f"there is no wire type {wire_type}")
        if size > end - position:
            raise WireError("a field is longer than its message")
        yield number, message[position : position + size]
        position += size


def last_bytes(message: bytes, wanted: int) -> bytes | None:
    """The length-delimited field `wanted`, the last one if there are several; None: absent."""
    found = None
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            found = value
    return found


def last_number(message: bytes, wanted: int, limit: int = MAX_FIELDS) -> int | None:
    """The varint field `wanted`, the last one if there are several; None: absent.

    Raises as `fields` does.
    """
    found = None
    for number, value in fields(message, limit):
        if number == wanted and isinstance(value, int):
            found = value
    return found


def text(value: Value) -> str:
    """A string field's value. Raises `WireError` for what is none."""
    if not isinstance(value, bytes):
        raise WireError("a string is expected here")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise WireError("a string is not UTF-8") from error


def repeated_uint32(value: Value) -> list[int]:
    """The numbers of one occurrence of a repeated uint32 field: one, or many when it is packed.

    Raises `WireError`; numbers are cut to 32 bits, as protobuf does.
    """
    if isinstance(value, int):
        return [value & 0xFFFFFFFF]
    if value and value[-1] & 0x80:
        raise WireError("a packed field ends within a number")
    numbers: list[int] = []
    number = shift = 0
    for byte in value:
        if byte < 0x80:
            numbers.append((number | byte << shift) & 0xFFFFFFFF)
            number = shift = 0
        else:
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift >= 7 * _MAX_VARINT_BYTES:
                raise WireError("a number is too long")
    return numbers


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(position, min(position + _MAX_VARINT_BYTES, len(message))):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, at + 1
        shift += 7
    raise WireError("a number is cut off or too long")
