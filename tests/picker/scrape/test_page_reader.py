"""A response parses alike however its bytes are cut; an ambiguous one is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.scrape.page_reader import (
    MAX_HEAD_BYTES,
    MAX_INTERIM_RESPONSES,
    PageReader,
    ResponseError,
)
from tests.depth import examples

OK = b"HTTP/1.1 200 OK\r\n"
CAP = 1000

COMPLETE = [
    (OK + b"content-length: 2\r\n\r\nhi", True),
    (OK + b"Content-Length: 2 \r\nX: y\r\n\r\nhi", True),
    (
        OK + b"transfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;a=b\r\ni\r\n0\r\ntrailer: x\r\n\r\n",
        True,
    ),
    (OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", False),
    (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", False),
    (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi", True),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", True),
    (OK + b"content-encoding: identity\r\ncontent-length: 2\r\n\r\nhi", True),
]


@pytest.mark.parametrize(("raw", "keep_alive"), COMPLETE)
@given(data=st.data())
@examples(20)
def test_a_response_is_the_same_however_it_is_cut(
    raw: bytes, keep_alive: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1))))
    reader = PageReader(CAP)
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [reader.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (reader.status, reader.body, reader.keep_alive) == (200, b"hi", keep_alive)


def test_without_a_length_the_body_ends_with_the_connection() -> None:
    reader = PageReader(CAP)
    assert not reader.feed(OK + b"\r\nhel")
    assert not reader.feed(b"lo")
    reader.end()
    assert (reader.body, reader.keep_alive) == (b"hello", False)


@pytest.mark.parametrize("surplus", [b"x", OK + b"content-length: 0\r\n\r\n", b"\r\n\r\nGET"])
def test_more_than_was_asked_for_spoils_the_connection_only(surplus: bytes) -> None:
    """The next answer could not be reported from it."""
    reader = PageReader(CAP)
    assert reader.feed(OK + b"content-length: 2\r\n\r\nhi" + surplus)
    assert (reader.body, reader.keep_alive) == (b"hi", False)


def test_a_response_without_a_body_needs_no_length() -> None:
    reader = PageReader(CAP)
    assert reader.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (reader.status, reader.body, reader.keep_alive) == (204, b"", True)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP response"),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi", "no HTTP response"),
        (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi", "no HTTP response"),
        (OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "no HTTP response"),
        (OK + b"transfer-encoding: gzip, chunked\r\n\r\n", "transfer encoding"),
        (OK + b"content-length: -1\r\n\r\n", "no HTTP response"),
        (OK + b"content-length: " + b"9" * 40 + b"\r\n\r\n", "no HTTP response"),
        (OK + b"content-length: 1001\r\n\r\n", "larger than 1000 bytes"),
        (OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "no HTTP response"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\nhello\r\n", "no HTTP response"),
        (OK + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, "larger than"),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9000, "larger than"),
        (OK + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 9000, "larger than"),
        (OK + b"\r\n" + b"x" * 1001, "larger than"),
        (OK + b"x: " + b"y" * MAX_HEAD_BYTES, "head is larger"),
        (OK + b"x: y\r\n" * MAX_HEAD_BYTES, "head is larger"),
        (OK + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi", "compressed"),
        (OK + b"a b: c\r\n\r\n", "no HTTP response"),
        (OK + b" folded: c\r\n\r\n", "no HTTP response"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 9, "unexpected status 100"),
        (b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "unexpected status 101"),
    ],
)
def test_an_ambiguous_or_invalid_response_is_refused(raw: bytes, reason: str) -> None:
    reader = PageReader(CAP)
    with pytest.raises(ResponseError, match=reason):
        reader.feed(raw)


def test_responses_are_read_up_to_the_limits() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    body = b"x" * CAP
    reader = PageReader(CAP)
    for _ in range(MAX_INTERIM_RESPONSES):
        assert not reader.feed(interim)
    assert reader.feed(OK + b"content-length: %d\r\n\r\n" % CAP + body)
    assert reader.body == body
    with pytest.raises(ResponseError, match="unexpected status 100"):
        PageReader(CAP).feed(interim * (MAX_INTERIM_RESPONSES + 1))
    reader = PageReader(CAP)
    beginning = OK + b"x: "
    assert not reader.feed(beginning + b"y" * (MAX_HEAD_BYTES - len(beginning)))
    with pytest.raises(ResponseError, match="head is larger"):
        reader.feed(b"y")


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200", OK + b"content-length: 5\r\n\r\nhi"])
def test_an_end_before_the_end_is_an_error(raw: bytes) -> None:
    reader = PageReader(CAP)
    assert not reader.feed(raw)
    with pytest.raises(ResponseError, match="ended before"):
        reader.end()


@given(pieces=st.lists(st.sampled_from([OK, b"\r\n", b"content-length: 3", b"abc", b"\0\xff"])))
@examples(200)
def test_no_bytes_make_it_raise_anything_else(pieces: list[bytes]) -> None:
    reader = PageReader(CAP)
    try:
        done = any(reader.feed(piece) for piece in pieces)
        if not done:
            reader.end()
    except ResponseError:
        return
    assert len(reader.body) <= CAP
