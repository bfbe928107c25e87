"""Texts and media are packed into tokens."""

from struct import pack

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from picker.tokenization.prompt_stream import MAX_MEDIA_TOKENS, PromptStream, packed_text
from picker.types import MultiModalFeature


def token_of(content: str) -> bytes:
    return pack("<I", xxhash.xxh64_intdigest(content.encode()) & 0xFFFFFFFF)


@given(st.lists(st.text(st.characters(), max_size=9), max_size=5))
def test_texts_are_their_utf8_padded_with_zeros(texts: list[str]) -> None:
    plain = "".join(texts).encode("utf-8", "surrogatepass")
    assert packed_text(texts) == plain + bytes(-len(plain) % 4)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("hello world", (1819043176, 1870078063, 6581362)), ("abcd", (0x64636261,)), ("", ())],
)
def test_four_bytes_are_a_token(text: str, tokens: tuple[int, ...]) -> None:
    assert packed_text([text]) == pack(f"<{len(tokens)}I", *tokens)


def test_media_start_on_a_token_boundary_with_a_token_of_their_hash() -> None:
    stream = PromptStream()
    stream.texts += ("he", "llo")
    stream.add_media("image", "i", 2)
    stream.add_media("audio", "é", 1)
    stream.texts.append("end")
    prompt = stream.finish()
    assert prompt.tokens == b"hello\0\0\0" + token_of("i") * 2 + token_of("é") + b"end\0"
    assert prompt.features == (
        MultiModalFeature("image", f"{xxhash.xxh64_intdigest(b'i'):016x}", 2, 2),
        MultiModalFeature("audio", xxhash.xxh64_hexdigest("é".encode()), 4, 1),
    )


def test_a_stream_without_content_is_an_empty_prompt() -> None:
    prompt = PromptStream().finish()
    assert (prompt.tokens, prompt.features) == (b"", ())


def test_the_media_tokens_of_a_prompt_are_bounded() -> None:
    stream = PromptStream()
    for content in "abcd":
        stream.add_media("video", content, MAX_MEDIA_TOKENS // 2 + 1)
    lengths = [feature.length for feature in stream.finish().features]
    assert lengths == [MAX_MEDIA_TOKENS // 2 + 1, MAX_MEDIA_TOKENS // 2 - 1, 1, 1]
