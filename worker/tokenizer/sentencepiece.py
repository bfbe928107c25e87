"""SentencePiece byte-pair encoding, from scored pieces. Pure.

Theory of operation. Text is escaped (spaces become `▁`, and a text usually gets one in front), cut
into characters, and then the two neighbours whose concatenation is the piece with the best score
are joined, the leftmost pair first among equals, until no neighbours make a piece. A character that
is no piece is spelled in byte pieces `<0x00>` to `<0xFF>`, or is the unknown piece where there are
none. This is the algorithm of the sentencepiece library; a list of ranked merges, as byte-level
vocabularies have, cannot express it, because different pairs that make the same piece rank equal.

Text is cut first where no piece reaches across: before a `▁` that follows another character, unless
the vocabulary has a piece with one inside. Words recur, so what became of them is remembered.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from worker.errors import ModelError
from worker.tokenizer.detokenize import decode

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_REMEMBERED_WORDS = 1 << 15
_LONGEST_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its id is its place. `kind` is SentencePiece's (and GGUF's)
    type: normal, unknown, control, user defined, unused or byte.

    `strips_left` and `strips_right`: a marked token that takes the blanks beside it along.
    """

    text: str
    score: float = 0.0
    kind: int = NORMAL
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class SentencePieceOptions:
    """What a model adds around a text. `space_after_marks`: text that follows a control or user
    defined token gets a space in front as the beginning does.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    add_space_prefix: bool = True
    space_after_marks: bool = True


class _Encoding:
    """Ids and where in the text each came from, under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.offsets: list[tuple[int, int]] = []

    def add(self, token_id: int, start: int, end: int) -> None:
        self.ids.append(token_id)
        self.offsets.append((start, end))


class SentencePieceTokenizer:
    """A tokenizer made of scored pieces. Owns a bounded memory of the words it has encoded."""

    def __init__(
        self, source: str, pieces: Sequence[Piece], options: SentencePieceOptions | None = None
    ) -> None:
        """Index the pieces; raise `ModelError` (naming `source`) when text cannot be encoded."""
        self._pieces = tuple(pieces)
        self._options = options or SentencePieceOptions()
        self._ids = {p.text: i for i, p in _of_kind(pieces, NORMAL, USER_DEFINED, UNUSED)}
        self._scores = {text: pieces[i].score for text, i in self._ids.items() if text}
        self._unused = {p.text for _, p in _of_kind(pieces, UNUSED)}
        self._byte_ids = _byte_ids(pieces)
        self._unknown_id = next((i for i, _ in _of_kind(pieces, UNKNOWN)), None)
        if self._byte_ids is None and self._unknown_id is None:
            raise ModelError(f"{source}: the vocabulary has neither 256 byte pieces nor an unknown")
        self._marks = {_escaped(p.text): i for i, p in _of_kind(pieces, CONTROL, USER_DEFINED)}
        self._mark_pattern = _mark_pattern(pieces)
        self._special_ids = frozenset(i for i, _ in _of_kind(pieces, CONTROL, UNKNOWN))
        self._bytes = tuple(_piece_bytes(p) for p in pieces)
        self._cuts_words = not any(re.search(f"[^{SPACE}]{SPACE}", text) for text in self._scores)
        self._remembered = lru_cache(_REMEMBERED_WORDS)(self._merged)

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return len(self._pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_ids`; the unknown piece is one of them."""
        return self._special_ids

    @property
    def strips_leading_space(self) -> bool:
        """See `Tokenizer.strips_leading_space`."""
        return self._options.add_space_prefix

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        return self.encode_with_offsets(text, add_special_tokens=add_special_tokens)[0]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """See `Tokenizer.encode_with_offsets`."""
        options = self._options
        encoding = _Encoding()
        if add_special_tokens and options.bos_id is not None:
            encoding.add(options.bos_id, 0, 0)
        escaped = _escaped(text)
        position, takes_space = 0, options.add_space_prefix
        for mark in self._mark_pattern.finditer(escaped) if self._mark_pattern else ():
            mark_id, plain = self._mark_id(mark[0]), escaped[position : mark.start()]
            if self._pieces[mark_id].strips_left:
                plain = plain.rstrip(_BLANKS)
            self._encode_plain(plain, position, takes_space, encoding)
            encoding.add(mark_id, position + len(plain), mark.end())
            position = mark.end()
            takes_space = options.add_space_prefix and options.space_after_marks
        self._encode_plain(escaped[position:], position, takes_space, encoding)
        if add_special_tokens and options.eos_id is not None:
            encoding.add(options.eos_id, len(text), len(text))
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer.decode`."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        text = decode(self.token_bytes, token_ids, skipped)
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._pieces[token_id].text if 0 <= token_id < len(self._pieces) else ""

    def _mark_id(self, matched: str) -> int:
        """The id of a marked token, matched with or without the blanks it takes along on its right
        (of which its own text may end with some).
        """
        known = self._marks.get(matched)
        end = max(1, len(matched.rstrip(_BLANKS)))
        while known is None:
            known, end = self._marks.get(matched[:end]), end + 1
        return known

    def _encode_plain(
        self, escaped: str, start: int, takes_space: bool, encoding: _Encoding
    ) -> None:
        """Append the pieces of escaped text without marks, which begins at `start`."""
        if not escaped:
            return
        end = start
        if takes_space:
            escaped, end = SPACE + escaped, start - 1
        first = len(encoding.ids)
        for piece in self._split(escaped):
            start, end = max(start, end), end + len(piece)
            known = self._ids.get(piece)
            if known is not None:
                encoding.add(known, start, end)
            elif self._byte_ids is not None:
                for byte in piece.encode("utf-8"):
                    encoding.add(self._byte_ids[byte], start, end)
            else:
                self._add_unknown(encoding, first, start, end)

    def _add_unknown(self, encoding: _Encoding, first: int, start: int, end: int) -> None:
        """A run of unknown characters is one unknown piece."""
        unknown = self._unknown_id
        if unknown is None:  # ruled out when the pieces were indexed
            return
        if len(encoding.ids) > first and encoding.ids[-1] == unknown:
            encoding.offsets[-1] = (encoding.offsets[-1][0], end)
        else:
            encoding.add(unknown, start, end)

    def _split(self, escaped: str) -> Iterator[str]:
        """The pieces of escaped text; a character that is no piece comes as itself."""
        if not self._cuts_words:
            yield from self._merged(escaped)
            return
        for word in _WORD.findall(escaped):
            known = len(word) <= _LONGEST_REMEMBERED
            yield from self._remembered(word) if known else self._merged(word)

    def _merged(self, word: str) -> tuple[str, ...]:
        merge = _Merge(word, self._scores)
        merge.run()
        return tuple(p for s in merge.symbols if s for p in merge.without(s, self._unused))


class _Merge:
    """The symbols of one word while they are joined. A joined symbol stands in the place of its
    first part, and the places of the others are empty.
    """

    def __init__(self, word: str, scores: dict[str, float]) -> None:
        self.symbols = list(word)
        self._scores = scores
        self._before = list(range(-1, len(word) - 1))
        self._after = list(range(1, len(word) + 1))
        self._queue: list[tuple[float, int, int, int]] = []  # (-score, left, right, length)
        self._parts: dict[str, tuple[str, str]] = {}

    def run(self) -> None:
        """Join until no two neighbours make a piece."""
        for right in range(1, len(self.symbols)):
            self._consider(right - 1, right)
        symbols = self.symbols
        while self._queue:
            _, left, right, length = heapq.heappop(self._queue)
            # Anything that happened to either since makes them longer, or empty.
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            self._after[left] = following = self._after[right]
            if following < len(symbols):
                self._before[following] = left
                self._consider(left, following)
            if self._before[left] >= 0:
                self._consider(self._before[left], left)

    def without(self, piece: str, unused: set[str]) -> Iterator[str]:
        """The parts of a piece that may stand in an encoding: unused ones are taken apart again."""
        parts = self._parts.get(piece) if piece in unused else None
        if parts is None:
            yield piece
        else:
            yield from self.without(parts[0], unused)
            yield from self.without(parts[1], unused)

    def _consider(self, left: int, right: int) -> None:
        first, second = self.symbols[left], self.symbols[right]
        joined = first + second
        score = self._scores.get(joined)
        if score is not None:
            self._parts[joined] = (first, second)
            heapq.heappush(self._queue, (-score, left, right, len(joined)))


_BLANKS = f"{SPACE} \t\n\r\f\v"


def _escaped(text: str) -> str:
    return text.replace(" ", SPACE)


def _of_kind(pieces: Sequence[Piece], *kinds: int) -> Iterator[tuple[int, Piece]]:
    return ((i, p) for i, p in enumerate(pieces) if p.kind in kinds)


def _byte_ids(pieces: Sequence[Piece]) -> list[int] | None:
    """Ids of the 256 byte pieces in order, or None where one is missing."""
    found: dict[int, int] = {}
    for i, piece in _of_kind(pieces, BYTE):
        match = _BYTE_PIECE.fullmatch(piece.text)
        if match is not None:
            found[int(match[1], 16)] = i
    return [found[byte] for byte in range(256)] if len(found) == 256 else None


def _mark_pattern(pieces: Sequence[Piece]) -> re.Pattern[str] | None:
    """Finds control and user defined tokens in escaped text, the longest at each place, with the
    blanks they take along on the right. Those on the left are cut off afterwards: looked for here,
    every blank of a long run would begin a search of the rest of it.
    """
    blanks = f"[{_BLANKS}]*"
    marked = [p for _, p in _of_kind(pieces, CONTROL, USER_DEFINED) if p.text]
    patterns = [
        re.escape(_escaped(p.text)) + blanks * p.strips_right
        for p in sorted(marked, key=lambda p: -len(p.text))
    ]
    return re.compile("|".join(patterns)) if patterns else None


def _piece_bytes(piece: Piece) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece.text) if piece.kind == BYTE else None
    if match is not None:
        return bytes.fromhex(match[1])
    if piece.kind in (CONTROL, UNKNOWN):
        return piece.text.encode()
    return piece.text.replace(SPACE, " ").encode()
