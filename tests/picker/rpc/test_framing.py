"""gRPC messages cut out of byte streams, the texts of headers, and the room for messages."""

import itertools
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.rpc.budget import ByteBudget, ByteShare
from picker.rpc.calls import RpcError, Status
from picker.rpc.framing import MAX_STATUS_TEXT_BYTES, MessageSplitter, status_text, timeout_seconds
from tests.depth import examples
from tests.support.picker.http2_peer import prefix


@examples(100)
@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 300), max_size=12))
def test_messages_do_not_depend_on_how_the_bytes_were_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(prefix(message) + message for message in messages)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter = MessageSplitter(100, ByteBudget())
    found = []
    for start, end in itertools.pairwise(edges):
        found += splitter.feed(data[start:end])
    assert found == messages
    assert splitter.is_between_messages


def test_a_message_may_be_as_long_as_the_limit() -> None:
    splitter = MessageSplitter(100, ByteBudget())
    data = prefix(bytes(100)) + bytes(100)
    for cut in (0, 50):
        assert splitter.feed(data[:cut]) == []
        assert splitter.feed(data[cut:]) == [bytes(100)]
    with pytest.raises(RpcError, match="a message of 101 bytes exceeds 100"):
        splitter.feed(prefix(bytes(101)))


def test_single_bytes_yield_each_message_at_its_last_byte() -> None:
    splitter = MessageSplitter(100, ByteBudget())
    data = prefix(b"one") + b"one" + prefix(b"") + prefix(b"two") + b"two"
    found = {at: out for at in range(len(data)) if (out := splitter.feed(data[at : at + 1]))}
    assert found == {7: [b"one"], 12: [b""], 20: [b"two"]}
    splitter.feed(b"\0")
    assert not splitter.is_between_messages


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"\x01\0\0\0\x01x", Status.UNIMPLEMENTED),
        (b"\x02\0\0\0\x01x", Status.INTERNAL),
        (b"\0\0\0\0\x65", Status.RESOURCE_EXHAUSTED),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED),
    ],
)
def test_a_prefix_that_cannot_be_served_is_refused_before_its_message(
    start: bytes, status: Status
) -> None:
    with pytest.raises(RpcError) as whole:
        MessageSplitter(100, ByteBudget()).feed(start)
    assert whole.value.status is status
    splitter = MessageSplitter(100, ByteBudget())
    with pytest.raises(RpcError) as pieces:
        [splitter.feed(bytes([byte])) for byte in start]
    assert pieces.value.status is status


@given(st.text(max_size=40))
def test_status_texts_are_printable_ascii_and_come_back(text: str) -> None:
    encoded = status_text(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote(encoded.decode()) == text.encode("utf-8", "replace").decode()


def test_a_long_status_text_is_cut_at_a_whole_character() -> None:
    """Peers refuse headers that are too large and lose the status with them."""
    text = "x" + "é" * MAX_STATUS_TEXT_BYTES
    cut = unquote(status_text(text).decode(), errors="strict")
    assert text.startswith(cut)
    assert MAX_STATUS_TEXT_BYTES - 1 <= len(cut.encode()) <= MAX_STATUS_TEXT_BYTES


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((b"5S", 5.0), (b"2H", 7200.0), (b"100m", 0.1), (b"3u", 3e-6), (b"1n", 1e-9)),
        *((b"", None), (b"5", None), (b"123456789S", None), (b"-1S", None), (b"5s", None)),
    ],
)
def test_timeouts_are_read_or_ignored(value: bytes, seconds: float | None) -> None:
    assert timeout_seconds(value) == (None if seconds is None else pytest.approx(seconds))


def test_a_budget_is_given_out_to_its_last_byte() -> None:
    budget = ByteBudget(10)
    first, second = ByteShare(budget), ByteShare(budget)
    assert first.grow(4)
    assert second.grow(6)
    assert not first.grow(1)
    assert (first.held_bytes, budget.held_bytes) == (4, 10)
    second.release()
    second.release()
    assert (second.held_bytes, budget.held_bytes) == (0, 4)
    assert first.grow(6)
    first.grow_beyond(1)
    assert budget.held_bytes == 11
    first.release()
    assert budget.held_bytes == 0
