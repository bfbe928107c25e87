"""Protobuf messages and gRPC frames, encoded by hand."""

from struct import pack


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def message(*members: tuple[int, int | bytes | str]) -> bytes:
    return b"".join(field(number, value) for number, value in members)


def frame(data: bytes, flag: int = 0) -> bytes:
    return pack(">BI", flag, len(data)) + data
