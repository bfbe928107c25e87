"""SentencePiece byte-pair encoding from scored pieces, run by the Rust `tokenizers` library.

Theory of operation. Text is escaped (spaces become `▁`, and a text usually gets one in front), cut
into characters, and then the two neighbours whose concatenation is the piece with the best score
are joined, the leftmost pair first among equals, until no neighbours make a piece. A character that
is no piece is spelled in byte pieces `<0x00>` to `<0xFF>`, or is the unknown piece where there are
none. The library joins by a list of ranked pairs instead: every way to split every piece, by the
piece's score. Pairs that make the same piece then rank one after the other rather than equal, which
has not made a difference in any text that was compared with the sentencepiece library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from worker.errors import ModelError
from worker.tokenizer.rust import LibraryTokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """One entry of the vocabulary; its id is its place. `kind` is SentencePiece's (and GGUF's)
    type: normal, unknown, control, user defined, unused or byte.

    `strips_left` and `strips_right`: a marked token that takes the blanks beside it along.
    """

    text: str
    score: float = 0.0
    kind: int = NORMAL
    strips_left: bool = False
    strips_right: bool = False

    @property
    def is_mark(self) -> bool:
        """Whether it is found in a text before anything is joined."""
        return self.kind in (CONTROL, USER_DEFINED) and bool(self.text)

    @property
    def mark_text(self) -> str:
        """What stands in a text for it, if it is a mark."""
        return self.text.replace(SPACE, " ")


@dataclass(frozen=True, slots=True)
class SentencePieceOptions:
    """What a model adds around a text. `space_after_marks`: text that follows a control or user
    defined token gets a space in front as the beginning does.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    add_space_prefix: bool = True
    space_after_marks: bool = True


class SentencePieceTokenizer(LibraryTokenizer):
    """A tokenizer made of scored pieces."""

    def __init__(
        self,
        source: str,
        pieces: Sequence[ScoredPiece],
        options: SentencePieceOptions | None = None,
    ) -> None:
        """Index the pieces; raise `ModelError` (naming `source`) when text cannot be encoded."""
        self._options = options or SentencePieceOptions()
        self._pieces = tuple(pieces)
        marks = tuple(p.mark_text for p in pieces if p.is_mark)
        # Without a space after marks there is only the one at the beginning, put there by hand.
        everywhere = self._options.add_space_prefix and self._options.space_after_marks
        self._prefixes = self._options.add_space_prefix and not everywhere
        self._marks = marks
        super().__init__(
            _rust_tokenizer(source, pieces, everywhere), _bytes_of, self._options.add_space_prefix
        )
        self._bytes = {i: _piece_bytes(piece) for i, piece in enumerate(pieces)}
        self.special_ids = frozenset(
            i for i, piece in enumerate(pieces) if piece.kind in (CONTROL, UNKNOWN)
        )
        self.vocab_size = len(self._pieces)
        self._split_ids = _unused_splits(pieces)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(self._prefixed(text), add_special_tokens=False)
        if self._split_ids:
            ids = [part for i in ids for part in self._split_ids.get(i, (i,))]
        if add_special_tokens:
            before, after = self._options.bos_id, self._options.eos_id
            ids = [*_present(before), *ids, *_present(after)]
        return ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        given = self._prefixed(text)
        shift = len(given) - len(text)
        found, spans = super().encode_with_offsets(given, add_special_tokens=False)
        pairs: list[tuple[int, tuple[int, int]]] = []
        for place, (token_id, (start, end)) in enumerate(zip(found, spans, strict=True)):
            start, end = max(0, start - shift), max(0, end - shift)
            # The library says of a space that was added that it came from the character behind it.
            following = spans[place + 1][0] - shift if place + 1 < len(spans) else None
            if self._pieces[token_id].text == SPACE and following == start:
                end = start
            pairs += [(part, (start, end)) for part in self._split_ids.get(token_id, (token_id,))]
        if add_special_tokens:
            before = [(i, (0, 0)) for i in _present(self._options.bos_id)]
            after = [(i, (len(text), len(text))) for i in _present(self._options.eos_id)]
            pairs = [*before, *pairs, *after]
        return [i for i, _ in pairs], [span for _, span in pairs]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id].text if 0 <= token_id < len(self._pieces) else ""

    def _prefixed(self, text: str) -> str:
        return f" {text}" if self._prefixes and text and not text.startswith(self._marks) else text


def _rust_tokenizer(source: str, pieces: Sequence[ScoredPiece], prepends: bool) -> RustTokenizer:
    has_bytes = len({m[1].upper() for p in pieces if (m := _byte_match(p))}) == 256
    unknown = next((p.text for p in pieces if p.kind == UNKNOWN), None)
    if not has_bytes and unknown is None:
        raise ModelError(f"{source}: the vocabulary has neither 256 byte pieces nor an unknown")
    model = models.BPE(
        vocab={p.mark_text if p.is_mark else p.text: i for i, p in enumerate(pieces)},
        merges=[(left, right) for _, left, right in _merges(pieces)],
        byte_fallback=has_bytes,
        unk_token=unknown,
        fuse_unk=True,
    )
    rust = RustTokenizer(model)
    escaping = normalizers.Replace(" ", SPACE)
    prefixing = [normalizers.Prepend(SPACE)] if prepends else []
    rust.normalizer = normalizers.Sequence([*prefixing, escaping])
    rust.add_tokens(
        [
            AddedToken(p.mark_text, lstrip=p.strips_left, rstrip=p.strips_right, normalized=False)
            for p in pieces
            if p.is_mark
        ]
    )
    return rust


def _merges(pieces: Sequence[ScoredPiece]) -> list[tuple[float, str, str]]:
    """Every pair that makes a piece, the best first, with the negative score."""
    scores = {p.text: p.score for p in pieces if p.kind in (NORMAL, UNUSED)}
    merges = [
        (-score, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return sorted(merges, key=lambda merge: merge[0])


def _unused_splits(pieces: Sequence[ScoredPiece]) -> dict[int, tuple[int, ...]]:
    """For each unused piece the ids that stand for it in an encoding: those it was joined from."""
    unused = {p.text for p in pieces if p.kind == UNUSED}
    if not unused:
        return {}
    ids = {p.text: i for i, p in enumerate(pieces)}
    halves = {left + right: (left, right) for _, left, right in reversed(_merges(pieces))}

    def parts(text: str) -> Iterator[int]:
        if text in unused and text in halves:
            for half in halves[text]:
                yield from parts(half)
        else:
            yield ids[text]

    return {ids[text]: tuple(parts(text)) for text in unused}


def _present(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _byte_match(piece: ScoredPiece) -> re.Match[str] | None:
    return _BYTE_PIECE.fullmatch(piece.text) if piece.kind == BYTE else None


def _piece_bytes(piece: ScoredPiece) -> bytes:
    match = _byte_match(piece)
    if match is not None:
        return bytes.fromhex(match[1])
    return piece.text.encode() if piece.kind in (CONTROL, UNKNOWN) else _bytes_of(piece.text)


def _bytes_of(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()
