"""A tokenizer without a model, for `--engine sim`: about one token a word, stable ids, no inverse.

A word outside the built-in list takes the id of a listed word by its hash. Prefix caching works: an
answer that is sent back encodes to its original ids. Ids: [0, 256) bytes; [256, 256 + 1024) words,
each standing for " word"; then the two ChatML marks.
"""

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

from worker.tokenizer.detokenize import decode

FIRST_WORD_ID = 256
HIDDEN_SIZE = 384  # of embeddings
IM_START, IM_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _word_list() -> tuple[str, ...]:
    onsets = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh", "tr", "gl")
    syllables = [onset + vowel for onset in onsets for vowel in ("a", "o")]
    codas = ("", "n")
    return tuple(
        first + second + codas[(i + j) % 2]
        for i, first in enumerate(syllables)
        for j, second in enumerate(syllables)
    )


WORDS = _word_list()
NUM_WORDS = len(WORDS)
IM_START_ID = FIRST_WORD_ID + NUM_WORDS
IM_END_ID = IM_START_ID + 1
VOCAB_SIZE = IM_END_ID + 1

# A word is one token for every eight letters, a run of line breaks is one token, and other blanks
# are none.
_PIECES = re.compile(r"<\|im_(?:start|end)\|>|\w{1,8}|[^\w\s]|\n+")
_ID_OF_WORD = {word: FIRST_WORD_ID + n for n, word in enumerate(WORDS)}
_MARKS = {IM_START: IM_START_ID, IM_END: IM_END_ID}


@lru_cache(maxsize=1 << 16)
def _piece_ids(piece: str) -> tuple[int, ...]:
    known = _MARKS.get(piece) or _ID_OF_WORD.get(piece)
    if known is not None:
        return (known,)
    if piece[0] == "\n":
        return (10,)
    raw = piece.encode("utf-8", "replace")
    if len(piece) == 1 and not piece.isalnum() and piece != "_":
        return tuple(raw)
    return (FIRST_WORD_ID + zlib.crc32(raw) % NUM_WORDS,)  # `hash` differs between processes


class SimTokenizer:
    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset((IM_START_ID, IM_END_ID))

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def strips_leading_space(self) -> bool:
        return False  # a word includes its leading space

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [i for piece in _PIECES.findall(text) for i in _piece_ids(piece)]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        found = [(i, m.span()) for m in _PIECES.finditer(text) for i in _piece_ids(m[0])]
        return [i for i, _ in found], [span for _, span in found]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return decode(self.token_bytes, token_ids, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < FIRST_WORD_ID:
            return bytes((token_id,))
        if token_id < IM_START_ID:
            return b" " + WORDS[token_id - FIRST_WORD_ID].encode()
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        if token_id < IM_START_ID:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        return {IM_START_ID: IM_START, IM_END_ID: IM_END}.get(token_id, "")
