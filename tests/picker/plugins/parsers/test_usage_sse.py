"""Events joined from pieces that are cut anywhere."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.parsers._usage import SseEvents
from tests.depth import examples

MARKED = b'{"usage":1}'


def events_of(pieces: list[bytes], limit: int = 1000) -> list[list[bytes]]:
    reader = SseEvents(b"usage", limit)
    found: list[list[bytes]] = []
    for index, piece in enumerate(pieces):
        found += reader.feed(piece, index == len(pieces) - 1)
    return found


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(newline: bytes) -> None:
    text = b"event: a\ndata: " + MARKED + b"\n\ndata: other\n\n"
    assert events_of([text.replace(b"\n", newline)]) == [[MARKED]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data:usage\n\n", [[b"usage"]]),
        (b"data:  usage\n\n", [[b" usage"]]),
        (b": usage\n\n", [[]]),
        (b"data\nid: usage\n\n", [[]]),
        (b"data: {\ndata: usage\ndata: }\n\n", [[b"{", b"usage", b"}"]]),
        (b"data: usage", [[b"usage"]]),
        (b"data: usage\n", [[b"usage"]]),
        (b"data: a\n\n\n\n\ndata: usage\n\n\n", [[b"usage"]]),
        (b"data: usage\n\ndata: usage 2\n\n", [[b"usage"], [b"usage 2"]]),
        (b"data: USAGE\n\n", []),
        (b"\n\n", []),
        (b"", []),
    ],
)
def test_the_values_of_data_lines_are_found(text: bytes, expected: list[list[bytes]]) -> None:
    assert events_of([text]) == expected


STREAM = (
    b"data: {}\r\n\r\n: hi\n\ndata: " + MARKED + b"\r\rdata:usage\ndata: 2\r\n\ndata: [DONE]\n\n"
)


@examples(200)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6), st.sampled_from([20, 1000]))
def test_cuts_do_not_change_the_events(cuts: list[int], limit: int) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    expected = [[MARKED], [b"usage", b"2"]]
    assert events_of([STREAM]) == expected
    assert events_of([bytes([byte]) for byte in STREAM]) == expected
    assert events_of(pieces) == expected


def test_events_that_end_by_one_newline_are_read_line_by_line_beyond_the_limit() -> None:
    """An empty line never comes, and yet little is stored and everything is read."""
    pieces = [b"data: usage %d\n" % number for number in range(10)]
    found = events_of(pieces, limit=40)
    assert len(found) > 1
    lines = [line for event in found for line in event]
    assert lines == [b"usage %d" % number for number in range(10)]


def test_a_line_longer_than_the_limit_is_dropped() -> None:
    pieces = [b"data: usage", b"x" * 50, b"x" * 50, b"\n\n", b"data: usage\n\n", b""]
    assert events_of(pieces, limit=30) == [[b"usage"]]
