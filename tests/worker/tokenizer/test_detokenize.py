"""The text does not depend on the split into tokens, and stop strings are cut exactly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import examples
from worker.tokenizer.detokenize import Detokenizer, decode


def one_byte(token_id: int) -> bytes:
    return bytes((token_id,))


def run(detokenizer: Detokenizer, chunks: list[bytes]) -> str:
    text = ""
    for chunk in chunks:
        text += detokenizer.feed(chunk)
        if detokenizer.matched is not None:
            break
    return text + detokenizer.finish()


def split(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(c, len(raw)) for c in cuts} | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(places)]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(0, 40)))
@examples(200)
def test_every_split_gives_the_text_of_the_whole(raw: bytes, cuts: list[int]) -> None:
    got = run(Detokenizer(one_byte), split(raw, cuts))
    assert got == decode(one_byte, raw) == raw.decode("utf-8", "replace")


def expected_cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Find the first stop string by growing the text a character at a time."""
    for end in range(1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


@given(
    st.text("abc€", max_size=14),
    st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40)),
)
@examples(300)
def test_stop_strings_are_cut_exactly_for_every_split(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(one_byte, stop=tuple(stop))
    got = run(detokenizer, split(text.encode(), cuts))
    assert (got, detokenizer.matched) == expected_cut(text, stop)


def test_only_a_possible_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(one_byte, stop=("STOP",))
    assert detokenizer.feed(b"abcST") == "ab"
    assert detokenizer.feed(b"ayed") == "cSTa"
    assert detokenizer.finish() == "yed"


def test_a_stop_string_can_be_included() -> None:
    detokenizer = Detokenizer(one_byte, stop=("lo",), include_stop=True)
    assert detokenizer.feed(b"hello world") + detokenizer.finish() == "hello"
    assert detokenizer.matched == "lo"


def test_stop_strings_do_not_count_in_the_first_tokens() -> None:
    detokenizer = Detokenizer(one_byte, stop=("a",), min_tokens=3)
    assert detokenizer.feed(b"aaaba!") + detokenizer.finish() == "aaab"


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(one_byte)
    assert detokenizer.feed("€".encode()[:2]) == ""
    assert detokenizer.finish() == "�"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_skipped_tokens_have_no_text(stop: tuple[str, ...]) -> None:
    raw = "€".encode()
    detokenizer = Detokenizer(one_byte, skip_ids=frozenset({0}), stop=stop)
    got = detokenizer.feed(raw[:1] + b"\0" + raw[1:]) + detokenizer.finish()
    assert got == "€"


@given(
    st.text(" aé€🙂", max_size=12).map(str.encode) | st.binary(max_size=12),
    st.lists(st.integers(0, 40)),
    st.sampled_from([(), ("a",), (" ",)]),
)
@examples(150)
def test_the_first_space_is_stripped_for_every_split(
    raw: bytes, cuts: list[int], stop: tuple[str, ...]
) -> None:
    detokenizer = Detokenizer(one_byte, stop=stop, strip_space=True)
    got = run(detokenizer, split(raw, cuts))
    whole = raw.decode("utf-8", "replace").removeprefix(" ")
    assert (got, detokenizer.matched) == expected_cut(whole, list(stop))
