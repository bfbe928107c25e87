"""Protobuf's bytes, compared with protobuf itself."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, SourceCodeInfo
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.protobuf_wire import (
    WireError,
    fields,
    last_bytes,
    last_number,
    repeated_uint32,
    text,
)


@given(st.text(), st.integers(0, 2**31 - 1), st.lists(st.text(max_size=3), max_size=3))
def test_fields_are_those_that_protobuf_wrote(
    name: str, number: int, dependencies: list[str]
) -> None:
    """Numbers, strings and repeated strings."""
    field = FieldDescriptorProto(name=name, number=number).SerializeToString()
    assert last_number(field, 3) == number
    assert text(last_bytes(field, 1) or b"") == name
    file = FileDescriptorProto(dependency=dependencies).SerializeToString()
    assert [text(value) for _, value in fields(file)] == dependencies


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_packed_numbers_are_those_that_protobuf_wrote(numbers: list[int]) -> None:
    """`path` of a location is a packed field of small numbers."""
    message = SourceCodeInfo.Location(path=numbers).SerializeToString()
    assert repeated_uint32(last_bytes(message, 1) or b"") == numbers


def test_of_a_repeated_single_field_the_last_counts() -> None:
    """As in protobuf; one of another type is not seen."""
    message = b"\x08\x01\x08\x02\x0a\x01a\x0a\x01b"
    assert last_number(message, 1) == 2
    assert last_bytes(message, 1) == b"b"
    assert last_number(message, 2) is None
    assert last_bytes(b"\x08\x01", 1) is None


def test_fixed_fields_and_long_numbers_are_read() -> None:
    """Negative numbers are written as ten bytes, and cut to 32 bits where 32 are asked for."""
    negative = b"\xff" * 9 + b"\x01"
    message = b"\x09" + b"\x01" * 8 + b"\x15" + b"\x02" * 4 + b"\x18" + negative
    assert list(fields(message)) == [(1, b"\x01" * 8), (2, b"\x02" * 4), (3, 2**64 - 1)]
    assert repeated_uint32(negative) == [2**32 - 1]
    assert repeated_uint32(2**64 - 1) == [2**32 - 1]


@pytest.mark.parametrize(
    "message",
    [
        b"\x08",  # no value
        b"\x08\x80",  # cut off
        b"\x08" + b"\x80" * 11,  # too long
        b"\x0a\x05a",  # longer than the message
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # absurdly long
        b"\x0d\x00",  # fixed, cut off
        b"\x0b\x0c",  # a group
        b"\x00\x01",  # field 0
        b"\x0e",  # wire type 6
        b"no healthy upstream",
    ],
)
def test_what_the_format_does_not_allow_is_an_error(message: bytes) -> None:
    """Nothing is guessed."""
    with pytest.raises(WireError):
        list(fields(message))


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\xff", b"\x80" * 10 + b"\x01"])
def test_packed_numbers_must_be_whole(packed: bytes) -> None:
    """Neither cut off nor endless."""
    with pytest.raises(WireError):
        repeated_uint32(packed)


@pytest.mark.parametrize("value", [7, b"\xff"])
def test_a_string_must_be_one(value: int | bytes) -> None:
    """Of bytes, and UTF-8."""
    with pytest.raises(WireError):
        text(value)


@given(st.binary(max_size=40))
def test_any_bytes_are_fields_or_an_error(message: bytes) -> None:
    """Nothing else escapes."""
    try:
        numbers = [number for number, _ in fields(message)]
    except WireError:
        return
    assert all(0 < number < 2**29 for number in numbers)
