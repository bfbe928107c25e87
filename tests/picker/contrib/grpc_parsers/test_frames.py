"""gRPC frames, one and many."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.contrib.grpc_parsers._frames import FrameSplitter, only_message
from picker.contrib.grpc_parsers._generated import grpc_bodies_pb2 as pb
from tests.support.picker.grpc_messages import frame


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        frame(b"a", flag=1),
        frame(b"a") + b"b",
        frame(b"ab")[:-1],
        b"no healthy upstream",
    ],
)
def test_a_broken_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"prefix|compressed"):
        only_message(pb.HttpBody, data)


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.integers(0, 60), max_size=5))
def test_pieces_of_a_stream_become_whole_messages(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, messages))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = FrameSplitter()
    found = [one for a, b in pairwise(places) for one in splitter.feed(stream[a:b])]
    assert found == messages
    assert [one for byte in stream for one in splitter.feed(bytes([byte]))] == messages


def test_compressed_and_large_messages_are_skipped() -> None:
    stream = (
        frame(b"zip", flag=1)
        + frame(b"x" * 11)
        + frame(b"a" * 10)
        + frame(b"", flag=1)
        + frame(b"b")
    )
    splitter = FrameSplitter(limit_bytes=10)
    assert splitter.feed(stream) == [b"a" * 10, b"b"]
    assert [one for byte in stream for one in splitter.feed(bytes([byte]))] == [b"a" * 10, b"b"]
