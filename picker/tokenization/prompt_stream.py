"""Collects what a prompt is made of and packs it, four bytes to a token.

Text is kept as it is and joined once at the end, as prompts may be long. A media item begins at a
token of its own and is so many copies of a token made from XXH64 of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import xxhash

from picker.types import BYTES_PER_TOKEN, MultiModalFeature

# All media of a prompt together: a short request may claim any size for what it refers to.
MAX_MEDIA_TOKENS = 2**20
_UINT32 = Struct("<I")
_MAX_TOKEN = 2**32 - 1
_ENCODING = ("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Packed tokens, and the media items among them."""

    tokens: bytes
    features: tuple[MultiModalFeature, ...] = ()


class PromptStream:
    """One prompt while it is put together."""

    __slots__ = ("_features", "_media_tokens", "_packed", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []  # append to it
        self._packed = bytearray()
        self._features: list[MultiModalFeature] = []
        self._media_tokens = 0

    def add_media(self, modality: str, content: str, num_tokens: int) -> None:
        """A media item of `num_tokens` tokens, known by its content.

        Beyond `MAX_MEDIA_TOKENS` in all, an item is a single token.
        """
        num_tokens = max(1, min(num_tokens, MAX_MEDIA_TOKENS - self._media_tokens))
        self._media_tokens += num_tokens
        self._flush()
        digest = xxhash.xxh64_intdigest(content.encode(*_ENCODING))
        offset = len(self._packed) // BYTES_PER_TOKEN
        self._packed += _UINT32.pack(digest & _MAX_TOKEN) * num_tokens
        self._features.append(MultiModalFeature(modality, f"{digest:016x}", offset, num_tokens))

    def finish(self) -> Prompt:
        """The prompt; its last token is padded with zeros."""
        if not self._packed:
            return Prompt(packed_text(self.texts))
        self._flush()
        return Prompt(bytes(self._packed), tuple(self._features))

    def _flush(self) -> None:
        self._packed += packed_text(self.texts)
        self.texts.clear()


def packed_text(texts: Sequence[str]) -> bytes:
    """The UTF-8 of all texts, one after the other, padded with zeros to whole tokens."""
    missing = -sum(map(len, texts)) % BYTES_PER_TOKEN
    text = "".join((*texts, "\0" * missing) if missing else texts)
    if text.isascii():  # a character is a byte, so the padding is right
        return text.encode()
    data = text[: len(text) - missing].encode(*_ENCODING)
    return data + bytes(-len(data) % BYTES_PER_TOKEN)
