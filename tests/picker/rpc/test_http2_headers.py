"""Header blocks remembered by their bytes mean what the decoder says, whatever came between."""

import pytest
from hpack import Decoder, Encoder, HPACKError
from hpack.struct import HeaderTuple, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc.http2.headers import HeaderBlocks, changes_table, encode_fields

NAMES = st.sampled_from([b":path", b":method", b"te", b"content-type", b"x-a", b"x-b"])
VALUES = st.sampled_from([b"", b"POST", b"/a/b", b"trailers", b"v" * 200, bytes(range(256))])
FIELDS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=5)


@given(
    st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 64, 4096])), max_size=12)
)
def test_a_memory_of_blocks_never_changes_their_meaning(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    encoder, twin = Encoder(), Decoder()
    remembering = HeaderBlocks(Decoder())
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        kinds = [
            (NeverIndexedHeaderTuple if secret else HeaderTuple)(name, value)
            for name, value, secret in fields
        ]
        block = encoder.encode(kinds, huffman=huffman)
        expected: dict[bytes, list[bytes]] = {}
        for name, value in twin.decode(block, raw=True):
            expected.setdefault(bytes(name), []).append(bytes(value))
        meant = {name: b",".join(values) for name, values in expected.items()}
        assert remembering.decode(block) == meant
        # Each block is one message; sent once more it would insert again, so it is only looked at.
        if not changes_table(block):
            assert remembering.decode(block) == meant


@pytest.mark.parametrize(
    ("block", "changes"),
    [
        (b"", False),
        (b"\x88\xbe", False),
        (b"\xff\x80\x80\x01\x88", False),
        (b"\x40\x01a\x01b", True),
        (b"\x88\x3f\xe1\x1f", True),
        (b"\x04\x03/ab\x88", False),
        (b"\x10\x01a\x01b", False),
        (b"\x0f\x10\x02xy\x83", False),
        (b"\x00\x01a\x7f\x49" + b"v" * 200 + b"\x41\x01x", True),
        (b"\x00\x01a\x7f\x49" + b"v" * 200 + b"\x82", False),
    ],
)
def test_a_change_of_the_table_is_found_after_any_field(block: bytes, changes: bool) -> None:
    assert changes_table(block) is changes


def test_a_block_that_is_none_is_an_error_and_not_remembered() -> None:
    blocks = HeaderBlocks(Decoder())
    for _ in range(2):
        with pytest.raises(HPACKError):
            blocks.decode(b"\xff\xff\xff")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.binary(max_size=20_000))))
def test_a_block_without_a_table_is_read_by_every_decoder(
    fields: list[tuple[bytes, bytes]],
) -> None:
    fields = [(b":status", b"200"), *fields]
    block = encode_fields(fields)
    assert not changes_table(block)
    decoder = Decoder(max_header_list_size=2**30)
    assert decoder.decode(block, raw=True) == fields
