"""Collects the texts and media of a prompt and packs them, four bytes per token.

Texts are joined once at the end, because prompts may be long. A media item starts on a token
boundary and repeats one token, derived from the XXH64 of its content.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import xxhash

from picker.types import BYTES_PER_TOKEN, MultiModalFeature

# For all media of a prompt together: a short request may claim any size for media at a URL.
MAX_MEDIA_TOKENS = 2**20
_UINT32 = Struct("<I")
_MAX_TOKEN = 2**32 - 1
_ENCODING = ("utf-8", "surrogatepass")  # JSON of clients may contain lone surrogates


@dataclass(frozen=True, slots=True)
class Prompt:
    """The packed tokens of a prompt and its media items."""

    tokens: bytes
    features: tuple[MultiModalFeature, ...] = ()


class PromptStream:
    __slots__ = ("_features", "_media_tokens", "_packed", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []  # callers append to it
        self._packed = bytearray()
        self._features: list[MultiModalFeature] = []
        self._media_tokens = 0

    def add_media(self, modality: str, content: str, num_tokens: int) -> None:
        """Append a media item; it is shortened so that all media stay within `MAX_MEDIA_TOKENS`."""
        num_tokens = max(1, min(num_tokens, MAX_MEDIA_TOKENS - self._media_tokens))
        self._media_tokens += num_tokens
        self._flush()
        digest = xxhash.xxh64_intdigest(content.encode(*_ENCODING))
        offset = len(self._packed) // BYTES_PER_TOKEN
        self._packed += _UINT32.pack(digest & _MAX_TOKEN) * num_tokens
        self._features.append(MultiModalFeature(modality, f"{digest:016x}", offset, num_tokens))

    def finish(self) -> Prompt:
        """Return the prompt; its last token is padded with zeros."""
        if not self._packed:
            return Prompt(packed_text(self.texts))
        self._flush()
        return Prompt(bytes(self._packed), tuple(self._features))

    def _flush(self) -> None:
        self._packed += packed_text(self.texts)
        self.texts.clear()


def packed_text(texts: Sequence[str]) -> bytes:
    """Concatenate `texts` as UTF-8, padded with zeros to whole tokens."""
    missing = -sum(map(len, texts)) % BYTES_PER_TOKEN
    text = "".join((*texts, "\0" * missing) if missing else texts)
    if text.isascii():  # a character is a byte, so the padding is right
        return text.encode()
    data = text[: len(text) - missing].encode(*_ENCODING)
    return data + bytes(-len(data) % BYTES_PER_TOKEN)
