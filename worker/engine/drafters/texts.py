"""Sequences of tokens as strings, with one character per token.

Python's own string search scans a few hundred tokens per microsecond and needs 2 to 4 bytes per
token, where an index in Python would need hundreds.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence

# No token: separates texts in one string.
END = chr(sys.maxunicode)

_CODEC = f"utf-32-{'le' if sys.byteorder == 'little' else 'be'}"
# From here on decoding an array is faster than joining characters.
_MANY_TOKENS = 64


def spell(token_ids: Sequence[int]) -> str:
    """Spell tokens as characters. Raises ValueError for ids from 0x10FFFF on."""
    if len(token_ids) < _MANY_TOKENS:
        text = "".join(map(chr, token_ids))
    else:
        # Ids in the range of the surrogates are characters like all others here.
        text = array("I", token_ids).tobytes().decode(_CODEC, "surrogatepass")
    if END in text:
        raise ValueError(f"token id {sys.maxunicode} cannot be spelled")
    return text


def tokens_of(text: Iterable[str]) -> tuple[int, ...]:
    return tuple(map(ord, text))


class SequenceTexts:
    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def read(self, seq_id: int, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, which continue the tokens read for `seq_id` before."""
        text = self._texts.get(seq_id, "")
        num_new = len(token_ids) - len(text)
        if num_new < 0:
            raise ValueError(f"sequence {seq_id} got {-num_new} tokens shorter")
        if num_new > 0:
            text += spell(token_ids[len(text) :])
            self._texts[seq_id] = text
        return text

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._texts)
